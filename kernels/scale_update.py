"""Update of every delayed scale of a model in one launch: amaxes enter the histories, the next scales come out of them.

    history[:, s] = amax[s], history[0, s], history[1, s], ...       newest first, the oldest falls out
    largest[s]    = max over history[age, s], age < window[s]
    factor[s]     = min(numerator[s] / largest[s], FP32's largest)   its mantissa cleared where a power of two is asked
                    0 where nothing is known: the next cast takes the tensor's own amax
    amax[s]       = -1                                               the slot has not run in the new step

A slot that did not run (amax < 0, or NaN) keeps its column and its factor; one whose numerator is 0 keeps its factor.

A program owns SLOTS columns and rolls them from the oldest rows up, a tile at a time: it reads rows h - 1, waits for
all its threads, and writes rows h, so that nothing is written before it was read.  Nothing else ever touches a column.
Cost: 8 bytes for each entry of the history; 10,000 slots of 16 steps are 1.3 MB, a launch and little else.
Twin: fp8engine/ops/reference/scale.py.  Source: TransformerEngine's delayed scaling recipe for the window rule.
"""

import torch
import triton
import triton.language as tl

from fp8engine.kernels.constant import Constant

FP32_MAX = Constant(torch.finfo(torch.float32).max)
NO_MANTISSA = Constant(~0x007FFFFF)
SLOTS = 32  # columns of a program: 128 bytes of a row, what memory hands out at once; many programs for few slots
MOST_ROWS = 64  # rows of a tile: 2048 entries, 16 a thread, whose reads are under way together
WARPS = 4


@triton.jit
def _scale_update_kernel(
    history, live, rules,
    H, S, stride_hh, stride_hs, stride_lr, stride_ls, stride_rr, stride_rs,
    ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    inside = slot < S
    amax = tl.load(live + slot * stride_ls, mask=inside, other=-1.0)
    rule = rules + slot * stride_rs
    numerator = tl.load(rule, mask=inside, other=0.0)
    window = tl.load(rule + stride_rr, mask=inside, other=0.0)
    power_of_2 = tl.load(rule + 2 * stride_rr, mask=inside, other=0.0)
    ran = amax >= 0  # False for NaN
    column = history + slot[None, :] * stride_hs
    largest = tl.zeros((SLOTS,), tl.float32)
    tiles = tl.cdiv(H, ROWS)
    for tile in range(tiles):
        age = (tiles - 1 - tile).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        here = inside[None, :] & (age < H)
        # Ahead of the newest comes this step's; beyond the history as well, where it tells nothing new.
        earlier = tl.load(column + (age - 1) * stride_hh, mask=here & (age > 0), other=amax[None, :])
        present = tl.load(column + age * stride_hh, mask=here, other=0.0)
        # Written back where nothing ran: a mask that differs from slot to slot would cut the stores to single words.
        rolled = tl.where(ran[None, :], earlier, present)
        # A thread may write what another one reads: row h is the neighbour's h - 1.  Triton puts no barrier here
        # itself, having an eye on shared memory alone (triton#10924).
        tl.debug_barrier()
        tl.store(column + age * stride_hh, rolled, mask=here)
        seen = tl.where(age.to(tl.float32) < window[None, :], rolled, 0.0)
        seen = tl.where(seen != seen, float("inf"), seen)  # both predict nothing, and tl.max is told no NaN
        largest = tl.maximum(largest, tl.max(seen, 0))
    known = largest > 0
    factor = tl.div_rn(numerator, tl.where(known, largest, 1.0))
    factor = tl.where(factor > FP32_MAX, FP32_MAX, factor)
    floor = (factor.to(tl.int32, bitcast=True) & NO_MANTISSA).to(tl.float32, bitcast=True)
    factor = tl.where(power_of_2 > 0, floor, factor)
    tl.store(live + stride_lr + slot * stride_ls, tl.where(known, factor, 0.0), mask=ran & (numerator > 0))
    tl.store(live + slot * stride_ls, tl.full((SLOTS,), -1.0, tl.float32), mask=inside)  # all read it before a barrier


def scale_update(history_HS: torch.Tensor, live_2S: torch.Tensor, rules_3S: torch.Tensor) -> None:
    """Roll history_HS (H >= 1), write factors into live_2S[1], reset live_2S[0]: FP32 tables of any strides, in place.

    live_2S: this step's amaxes, or -1; factors.  rules_3S: numerators, windows in steps, whether powers of two.
    """
    h, s = history_HS.shape
    if s == 0:
        return
    _scale_update_kernel[(triton.cdiv(s, SLOTS),)](
        history_HS, live_2S, rules_3S,  # inputs, the first two also outputs
        h, s, *history_HS.stride(), *live_2S.stride(), *rules_3S.stride(),  # sizes
        ROWS=min(triton.next_power_of_2(h), MOST_ROWS), SLOTS=SLOTS, num_warps=WARPS,  # constants
        num_stages=1,  # a pipeline would read ahead of the writes
    )  # fmt: skip
