"""TransformerLayer.from_hf: every family's block gives its own numbers again, forward and backward, or is refused."""

from typing import Any

import pytest
import torch
from support import sqnr

import fp8engine as fe

pytest.importorskip("transformers")
import transformers
from hf.families import FAMILIES, Family

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
REFUSED = {
    "t5": "relative positions",
    "t5-v1.1": "relative positions",
    "mixtral": "mixture of experts",
    "qwen2_moe": "mixture of experts",
    "qwen3_moe": "mixture of experts",
}
FITTING = [name for name in FAMILIES if name not in REFUSED and name != "whisper"]
FP32 = fe.high_precision(fe.FP32)
# Two computations in FP32 of the same: every rounding is 2^-24 of its result (144 dB); some dozens of them, with sums
# of up to 64 terms and angles of up to 12, cost 20 log10(64) = 36 dB at worst.
SAME_DB = 108.0


class Calls:
    """What goes into and comes out of each block in one forward of its model, and the model's padding mask."""

    def __init__(self, family: Family, **options: Any):
        self.model = family.build(attn_implementation="eager", **options)
        self.batch = family.batch()
        blocks = fe.hf.describe(self.model).blocks
        self.blocks = {block.name: self.model.get_submodule(block.name) for block in blocks}
        self.seen: dict[str, tuple[torch.Tensor, tuple]] = {}
        hooks = [
            module.register_forward_pre_hook(lambda m, a, k, n=name: self._note(n, a, k), with_kwargs=True)
            for name, module in self.blocks.items()
        ]
        with torch.no_grad():
            self.model(**self.batch)
        for hook in hooks:
            hook.remove()
        mask = self.batch.get("attention_mask")
        self.padding = None if mask is None else mask.bool()

    def _note(self, name: str, args: tuple, kwargs: dict) -> None:
        first, *rest = args or (kwargs.pop("hidden_states"),)
        without_cache = [None if isinstance(each, transformers.Cache) else each for each in (*rest, *kwargs.values())]
        kwargs = dict(zip(kwargs, without_cache[len(rest) :], strict=True))
        self.seen[name] = first, (without_cache[: len(rest)], kwargs)

    def theirs(self, name: str, x: torch.Tensor) -> torch.Tensor:
        args, kwargs = self.seen[name][1]
        y = self.blocks[name](x, *args, **kwargs)
        return y[0] if isinstance(y, tuple) else y


def both_ways(layer, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def check(calls: Calls, name: str, recipe: Any, bounds=(SAME_DB, SAME_DB)) -> fe.TransformerLayer:
    layer = fe.TransformerLayer.from_hf(calls.blocks[name], recipe)
    x = calls.seen[name][0].detach()
    dy = torch.randn(x.shape)
    wanted = both_ways(lambda leaf: calls.theirs(name, leaf), x, dy)
    found = both_ways(lambda leaf: layer(leaf, calls.padding), x, dy)
    for want, got, bound in zip(wanted, found, bounds, strict=True):
        print(name, sqnr(want, got))
        assert sqnr(want, got) > bound
    return layer


@pytest.mark.parametrize("name", FITTING)
def test_a_block_gives_its_own_numbers_again(name: str):
    calls = Calls(FAMILIES[name])
    for block in calls.blocks:
        check(calls, block, FP32)
