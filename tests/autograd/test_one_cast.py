"""One key for a tensor's codes and for the values that an emulated matmul reads: a cast's text."""

import pytest
import torch
from torch import nn

from fp8engine.autograd.features import EXCLUDED, NAMES, why_excluded
from tests.helpers.support import FP8_RECIPES, converted, same, saved


class Siblings(nn.Module):
    """q, whose weight takes no gradient, reads x as values on a CPU; k keeps codes of it for its weight's gradient."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(160, 48), nn.Linear(160, 48)

    def forward(self, x):
        return self.q(x) + self.k(x)


def step(recipe: str, x: torch.Tensor, share: bool) -> tuple[list[torch.Tensor], list[torch.dtype]]:
    """(x's and k's gradients, the dtypes of what is saved of x's size)."""
    torch.manual_seed(0)
    model = converted(nn.Sequential(Siblings()), recipe)
    q, k = model[0].q, model[0].k
    q.weight.requires_grad_(False)
    if not share:
        k.register_forward_pre_hook(lambda layer, given: (given[0].clone(),))
    grads = torch.autograd.grad(model(x).sin().sum(), [x, k.weight])
    return list(grads), [t.dtype for t in saved(model, x) if t.numel() == x.numel()]


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_what_is_kept_until_backward_is_codes_whoever_has_cast_before(recipe: str):
    x = torch.randn(70, 160, requires_grad=True)
    (shared, kept), (apart, wanted) = (step(recipe, x, share) for share in (True, False))
    assert same(shared, apart)
    assert kept == wanted
    assert recipe == "rowwise_gw_hp" or kept == [torch.float8_e4m3fn], "whose wgrad is in 16 bits"


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
