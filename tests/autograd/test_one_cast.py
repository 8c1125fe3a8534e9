"""One key for a tensor's codes and for the values that an emulated matmul reads: a cast's text."""

import pytest
import torch
from torch import nn

from fp8engine.autograd.features import EXCLUDED, NAMES, why_excluded
from tests.helpers.support import FP8_RECIPES, converted


class Siblings(nn.Module):
    """q, whose weight takes no gradient, reads x as values on a CPU; k keeps codes of it for its weight's gradient."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(160, 48), nn.Linear(160, 48)

    def forward(self, x):
        return self.q(x) + self.k(x)


def step(recipe: str, x: torch.Tensor, share: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(x's and k's gradients, what is saved of x's size)."""
    torch.manual_seed(0)
    model = converted(nn.Sequential(Siblings()), recipe)
    model[0].q.weight.requires_grad_(False)
    if not share:
        model[0].k.register_forward_pre_hook(lambda layer, given: (given[0].clone(),))
    saved: list[torch.Tensor] = []
    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = model(x)
    y.sin().sum().backward()
    assert x.grad is not None
    return [x.grad, model[0].k.weight.grad], [t for t in saved if t.numel() == x.numel()]


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_what_is_kept_until_backward_is_codes_whoever_has_cast_before(recipe: str):
    x = torch.randn(70, 160)
    shared, apart = (step(recipe, x, share) for share in (True, False))
    for mine, other in zip(shared[0], apart[0], strict=True):
        assert torch.equal(mine, other)
    kept = [t.dtype for t in shared[1]]
    assert kept == [t.dtype for t in apart[1]]
    if recipe != "rowwise_gw_hp":  # whose wgrad is in 16 bits
        assert kept == [torch.float8_e4m3fn]


def test_a_tensors_operands_are_found_by_the_text_of_their_cast():
    model, seen = converted(nn.Sequential(Siblings()), "blockwise"), []
    model[0].k.register_forward_pre_hook(lambda layer, given: seen.append(set(given[0].fp8)))
    model(torch.randn(8, 160))
    assert seen == [{"e4m3 1x128 p2", "e4m3 128x1 p2"}]


def test_every_exclusion_reads_the_same_from_both_sides_and_names_both_and_the_remedy():
    names = set(NAMES)
    assert {name for pair in EXCLUDED for name in pair} == names
    for has in names:
        for wanted in names - {has}:
            told, back = why_excluded("up", [has], wanted), why_excluded("up", [wanted], has)
            assert (told is None) == (back is None) == (not {(has, wanted), (wanted, has)} & set(EXCLUDED))
            if told is not None and back is not None:
                assert has in told
                assert wanted in told
                assert told.partition("beside it: ")[2] == back.partition("beside it: ")[2]
