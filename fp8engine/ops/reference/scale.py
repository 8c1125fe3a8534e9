"""Scales: from an amax, and from a window of amaxes for the next step.

    s = MAX / amax            in FP32, correctly rounded; 1 for amax 0; the largest finite FP32 where it overflows
    power of two              the mantissa bits of s cleared, i.e. rounded down
    stored scale = 1 / s      x ≈ q * scale

Clearing bits is not `exp2(floor(log2(s)))`, whose log2 rounds up just below a power of two and so comes out
twice too large.  Division is tensor by tensor: `448 / tensor` is a reciprocal and a multiply in torch, one
ulp off for 23 % of amaxes.  Source: TransformerEngine's delayed scaling recipe for the window rule.
"""

from __future__ import annotations

import torch

FP32_MAX = torch.finfo(torch.float32).max
MANTISSA_BITS = 0x007FFFFF


def scale_factor(amax: torch.Tensor, maximum: torch.Tensor | float, power_of_2: bool = False) -> torch.Tensor:
    """s with which a tensor of that amax fills a format up to `maximum`.

    amax: FP32, any shape, finite.  maximum: the format's largest value, or a tensor of them.

    >>> scale_factor(torch.tensor([0.0, 2.0, 3.0]), 448.0, power_of_2=True)
    tensor([  1., 128., 128.])
    """
    maximum = torch.as_tensor(maximum, dtype=torch.float32, device=amax.device)
    s = torch.where(amax > 0, maximum / amax, 1.0).clamp_(max=FP32_MAX)
    return floor_power_of_2(s) if power_of_2 else s


def floor_power_of_2(s: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is not above s (FP32, positive and normal)."""
    return s.view(torch.int32).bitwise_and(~MANTISSA_BITS).view(torch.float32)


def scale_update(history_HS: torch.Tensor, live_2S: torch.Tensor, rules_3S: torch.Tensor) -> None:
    """Enter this step's amaxes into the window and predict the next scales: every slot of a model in one call.

    history_HS: amax of the last H steps, newest first, in place; 0 where there was none.
    live_2S: row 0 this step's amax, -1 for a slot that did not run (its column is left alone), reset to -1;
        row 1 the factor s, rewritten for slots with a predicted scale; 0 where nothing is known yet (the window
        is empty or all zero), which makes the next cast take the tensor's own amax.
    rules_3S: row 0 MAX / 2^margin, or 0 for a slot whose scale is not predicted; row 1 the window in steps;
        row 2 whether s is a power of two.

    >>> history, live = torch.zeros(2, 1), torch.tensor([[4.0], [0.0]])
    >>> scale_update(history, live, torch.tensor([[448.0], [2.0], [0.0]]))
    >>> history[:, 0].tolist(), live[:, 0].tolist()
    ([4.0, 0.0], [-1.0, 112.0])
    """
    # `.data` has a version counter of its own: a graph may have saved the tables for its backward.
    history_HS, live_2S = history_HS.data, live_2S.data
    amax_S, s_S = live_2S
    numerator_S, window_S, power_of_2_S = rules_3S
    ran_S = amax_S >= 0
    rolled_HS = torch.cat([amax_S[None], history_HS[:-1]])
    history_HS.copy_(torch.where(ran_S, rolled_HS, history_HS))
    age_H1 = torch.arange(history_HS.shape[0], device=history_HS.device)[:, None]
    largest_S = torch.where(age_H1 < window_S, history_HS, 0.0).amax(0)
    next_S = (numerator_S / torch.where(largest_S > 0, largest_S, 1.0)).clamp_(max=FP32_MAX)
    next_S = torch.where(power_of_2_S > 0, floor_power_of_2(next_S), next_S)
    next_S = torch.where(largest_S > 0, next_S, 0.0)
    s_S.copy_(torch.where(ran_S & (numerator_S > 0), next_S, s_S))
    amax_S.fill_(-1.0)
