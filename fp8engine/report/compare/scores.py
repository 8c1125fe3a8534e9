"""Scores of a converted copy against the model in FP32, text by text, as means with standard errors.

Text i has n_i answers (predicted tokens, or one embedding), and the copy's score on it is the sum s_i.  Over k texts

    mean = sum s_i / sum n_i        error = sqrt( k / (k - 1) * sum (s_i - mean n_i)^2 ) / sum n_i

the standard error of a ratio of sums (W. G. Cochran, Sampling Techniques, 6.3); where all n_i are equal it is the usual
sd / sqrt(k).  Tokens of one text are not independent, so texts are counted, not tokens.  The change of a loss is
paired: s_i is the copy's loss on a text minus the model's own on the same text, whose length and difficulty fall out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from fp8engine._torch import tree_leaves
from fp8engine.amp.difference import Difference
from fp8engine.errors import ConversionError
from fp8engine.report.compare.batches import NOTHING, Batch, pooled, real_rows

ROWS = 128  # taken into FP64 at once: logits of a large vocabulary in FP64 would be the largest tensor of all


class Estimate(NamedTuple):
    """A mean over texts and its standard error; error None: of one text, which has none."""

    value: float
    error: float | None

    def times(self, factor: float) -> Estimate:
        """In another unit."""
        return Estimate(self.value * factor, None if self.error is None else self.error * abs(factor))


def ratio(sums: Sequence[float], counts: Sequence[int]) -> Estimate | None:
    """The mean sum(sums) / sum(counts) and its standard error; None without an answer, NaN where a sum is not finite.

    >>> ratio([1.0, 3.0], [1, 1])
    Estimate(value=2.0, error=1.0)
    >>> ratio([3.0], [2]), ratio([], [])
    (Estimate(value=1.5, error=None), None)
    """
    answers, texts = sum(counts), len(counts)
    if not answers:
        return None
    mean = sum(sums) / answers
    if texts < 2:
        return Estimate(mean, None)
    left = sum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    return Estimate(mean, math.sqrt(texts / (texts - 1) * left) / answers)


@dataclass
class Scores:
    """What the outputs of all batches add up to, in a list for each score with one number a text."""

    high: list[float] = field(default_factory=list)
    change: list[float] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)
    same: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    output: Difference = field(default_factory=Difference)

    def add(self, low: Any, high: Any, batch: Batch) -> None:
        """Add one batch's outputs, of the copy and of the model itself."""
        ours, theirs = answer(low).detach(), answer(high).detach()
        if batch.targets is not None:
            asked = batch.targets != NOTHING
            text, targets = asked.nonzero()[:, 0], batch.targets[asked]
            ours, theirs = ours[asked].float(), theirs[asked].float()
            losses = [F.cross_entropy(logits, targets, reduction="none").double() for logits in (ours, theirs)]
            self.high += _sums(losses[1], text, batch)
            self.change += _sums(losses[0] - losses[1], text, batch)
            self.predicted += _sums(torch.ones_like(targets), text, batch)
            self._agree(ours, theirs, text, batch)
        elif hasattr(high, "logits"):
            text = _text_of(theirs, batch.real)
            ours, theirs = real_rows(ours, batch.real), real_rows(theirs, batch.real)
            self._agree(ours, theirs, text, batch)
        else:
            pairs = pooled(ours.double(), batch.real), pooled(theirs.double(), batch.real)
            self.cosines += F.cosine_similarity(*pairs, dim=-1).tolist()
            ours, theirs = real_rows(ours, batch.real), real_rows(theirs, batch.real)
        self.output.add(ours, theirs, ROWS)

    def _agree(self, ours: torch.Tensor, theirs: torch.Tensor, text: torch.Tensor, batch: Batch) -> None:
        """An answer with a NaN in it agrees with none: argmax would name the NaN's place."""
        same = (ours.argmax(-1) == theirs.argmax(-1)) & ~(ours.isnan() | theirs.isnan()).any(-1)
        same = same.reshape(len(text), -1)
        self.same += _sums(same.sum(1), text, batch)
        self.answers += _sums(torch.full_like(text, same.shape[1]), text, batch)


def _text_of(values: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The number, in its batch, of the text that each of `real_rows` belongs to."""
    if (values.dim() > 2 and values.shape[:2] == real.shape) or len(values) == real.numel():
        return real.nonzero()[:, 0]
    if len(values) == len(real):
        return torch.arange(len(real), device=values.device)
    raise ConversionError(
        f"the model's logits are {list(values.shape)} for {list(real.shape)} tokens: want a row a text or a token"
    )


def _sums(values: torch.Tensor, text: torch.Tensor, batch: Batch) -> list:
    """[texts of the batch]: the sum of the values of each text.  text: [N], the text of each value."""
    return torch.zeros(len(batch.real), dtype=values.dtype, device=values.device).index_add(0, text, values).tolist()


def first(output: Any, *, with_grad: bool = False) -> torch.Tensor:
    """The first tensor in a model's output.  Raises ConversionError where there is none."""
    tensors = (value for value in tree_leaves(output) if isinstance(value, torch.Tensor))
    found = next((tensor for tensor in tensors if tensor.requires_grad or not with_grad), None)
    if found is None:
        wanted = "tensor that has a gradient" if with_grad else "tensor"
        raise ConversionError(f"the model returns no {wanted}: the comparison needs one in its output")
    return found


def answer(output: Any) -> torch.Tensor:
    """What a model answers: its logits, else its last hidden state, else its first tensor."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(value := getattr(output, name, None), torch.Tensor):
            return value
    return first(output)
