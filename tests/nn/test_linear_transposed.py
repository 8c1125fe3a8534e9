"""On backends that multiply codes, x and dy are cast once, transpose included: same values, no copy, one byte saved."""

import sys

import pytest
import torch
from support import converted, numerics_of, same, saved, tables

import fp8engine as fe

TURNING = ("current", "delayed", "rowwise")  # torch's scaled matmul, which a CPU has, takes no blocks
X, W, DY = (20, 48), (33, 48), (20, 33)


def step(recipe: str) -> tuple[fe.Linear, list[torch.Tensor]]:
    """A layer after two steps on cublas, and what the second gave."""
    torch.manual_seed(0)
    layer, results = fe.Linear(48, 33, recipe=recipe), []
    for _ in range(2):
        x = torch.randn(4, 5, 48).requires_grad_()
        with fe.backend("cublas"):
            y = layer(x)
            results = [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], torch.randn(4, 5, 33))]
    return layer, results


@pytest.mark.parametrize("recipe", TURNING)
def test_x_and_dy_and_the_weight_are_read_once_and_the_values_are_those_of_two_casts(recipe: str, monkeypatch, casts):
    layer, turned = step(recipe)
    # Two steps of one version of the weight: the second is taken for a second microbatch, and casts it again.
    assert casts == [("cast_transpose", shape) for shape in (X, W, DY)] * 2
    made = numerics_of(layer).recipe
    monkeypatch.setitem(vars(made), "input_serves_both", False)
    monkeypatch.setitem(vars(made), "grad_serves_both", False)
    other, apart = step(recipe)
    assert same(turned, apart)
    assert same(tables(layer), tables(other))


def test_layers_that_share_an_input_share_its_transpose(casts):
    class Heads(torch.nn.ModuleList):
        def forward(self, x):
            return torch.stack([layer(x).sum() for layer in self]).sum()

    block = converted(Heads(torch.nn.Linear(32, 16) for _ in range(3)))
    x = torch.randn(8, 32, requires_grad=True)
    with fe.backend("cublas"):
        block(x).backward()
    assert casts.count(("cast_transpose", (8, 32))) == 1
    slots = [fe.scaling_state(block)[f"{i}.input"] for i in range(3)]
    assert [(int(slot.calls), slot.amax, int(slot.elements)) for slot in slots] == [(1, x.abs().max(), 8 * 32)] * 3


def test_a_frozen_weight_needs_no_transpose_of_x_and_a_first_layer_none_of_dy(casts):
    layer = fe.Linear(32, 16, recipe="current")
    layer.weight.requires_grad_(False)
    x = torch.randn(8, 32, requires_grad=True)
    with fe.backend("cublas"):
        layer(x).sum().backward()
        assert casts == [("quantize", (8, 32)), ("cast_transpose", (16, 32)), ("quantize", (8, 16))]
        casts.clear()
        layer.weight.requires_grad_(True)
        layer(x.detach()).sum().backward()
    assert [name for name, shape in casts if shape == (8, 32)] == ["cast_transpose"]
    assert [name for name, shape in casts if shape == (8, 16)] == ["quantize"]  # dy serves wgrad alone


@pytest.mark.parametrize("recipe", TURNING)
def test_what_is_saved_is_the_transpose_a_byte_an_element(recipe: str):
    layer, x = fe.Linear(48, 33, recipe=recipe, dtype=torch.bfloat16), torch.randn(X).bfloat16().requires_grad_()
    with fe.backend("cublas"):
        held = saved(layer, x)
    codes = [t for t in held if t.dtype == torch.float8_e4m3fn]
    assert [(tuple(t.shape), t.is_contiguous()) for t in codes] == [((48, 20), True)]
    scales = 4 * (48 if recipe == "rowwise" else 1)
    assert sum(t.nbytes for t in held) == x.nbytes // 2 + scales  # half of what a 16-bit Linear keeps, and its scales


@pytest.mark.parametrize("recipe", TURNING)
def test_a_graph_for_a_card_casts_once_too(recipe: str, casts, monkeypatch: pytest.MonkeyPatch):
    # No card here: the CPU's graph is traced as a card's would be, and run on the reference.
    monkeypatch.setattr(sys.modules["fp8engine.autograd.operands"], "graphs_run_on", lambda where: "cublas")
    layer, x = fe.Linear(48, 33, recipe=recipe), torch.randn(X, requires_grad=True)
    eager = fe.Linear(48, 33, recipe=recipe)
    eager.load_state_dict(layer.state_dict())
    found = []
    for each, run in ((eager, eager), (layer, torch.compile(layer, backend="aot_eager", fullgraph=True))):
        casts.clear()
        with fe.backend("cublas"):
            y = run(x)
            found.append([y.detach(), *torch.autograd.grad(y, [x, *each.parameters()], torch.ones_like(y))])
    assert same(*found)
    assert casts == [("cast_transpose", shape) for shape in (X, W, DY)]


def test_without_gradients_nothing_is_cast_for_a_backward(casts):
    layer, x = fe.Linear(48, 33, recipe="rowwise"), torch.randn(X, requires_grad=True)
    for name in ("cublas", "reference"):
        casts.clear()
        with torch.no_grad(), fe.backend(name):
            layer(x * 1)
        assert [cast for cast in casts if cast[1] == X] == [("quantize", X)]
