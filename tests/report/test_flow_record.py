"""flow.record's manners: inputs as convert takes them, modules of the engine, and nothing left behind."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import converted, numerics_of, same, state_of, tables
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

import fp8engine as fe
from fp8engine.report import flow
from fp8engine.report.flow import Consumer

K = 8


class Model(nn.Module):
    """Two layers joined by `function(self, x)`."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(K, K), nn.Linear(K, K), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


@pytest.mark.parametrize("given", [torch.ones(1, 4, K), (torch.ones(1, 4, K),), [torch.ones(1, 4, K)], "keywords"])
def test_inputs_as_convert_takes_them(given: Any):
    given = {"x": torch.ones(1, 4, K)} if given == "keywords" else given
    (made,) = flow.record(Model(lambda m, x: m.a(x)), given).layers["a"].producer
    assert made == Consumer("input", "x" if isinstance(given, dict) else "[0]")


def test_a_model_that_is_one_layer_and_a_layer_that_never_ran():
    assert flow.record(nn.Linear(K, K), torch.ones(1, K)).layers[""].kinds == ("output",)
    layer = flow.record(Model(lambda m, x: m.a(x)), torch.ones(1, K)).layers["b"]
    assert (layer.calls, layer.consumers) == (0, ())


def test_fused_modules_say_what_is_inside():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = fe.Attention(32, 4, recipe="current")
            self.first = fe.LayerNormLinear(32, 32, recipe="current")
            self.mlp = fe.LayerNormMLP(32, 64, "swiglu", recipe="current", norm="rms")

        def forward(self, x):
            x = x + self.attention(x)
            return x + self.mlp(torch.tanh(self.first(x)))

    layers = flow.record(Block(), torch.randn(2, 4, 32)).layers
    for name in ("q_proj", "k_proj", "v_proj"):
        assert layers[f"attention.{name}"].kinds == ("softmax",)
    assert [made.kind for made in layers["attention.o_proj"].producer] == ["attention"]
    assert layers["first.linear"].producer == (Consumer("norm", "first.norm"),)
    assert layers["first.linear"].consumers == (Consumer("activation", "aten.tanh"),)
    assert layers["mlp.gate_up"].producer == (Consumer("norm", "mlp.norm"),)
    assert layers["mlp.gate_up"].consumers == layers["mlp.down"].producer == (Consumer("activation", "mlp.swiglu"),)
    assert layers["mlp.down"].kinds == ("residual",)


def test_experts_in_one_module():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = (fe.GroupedLinear(2, 32, 32, recipe="rowwise") for _ in range(2))

        def forward(self, x):
            return self.down(F.gelu(self.up(x, [3, 1])), [3, 1])

    layers = flow.record(Experts(), torch.randn(4, 32)).layers
    assert layers["up"].consumers == layers["down"].producer == (Consumer("activation", "aten.gelu"),)
    assert layers["down"].kinds == ("output",)


def test_nothing_is_left_behind_even_where_the_forward_fails():
    def fails(m, x):
        m.a(torch.rand(1, K))
        random.random()
        raise ArithmeticError("the model's own")

    model = converted(Model(fails), "delayed")
    model.b.eval()
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    before = tables(model), torch.get_rng_state(), random.getstate(), torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(ArithmeticError, match="the model's own"):
        flow.record(model, torch.ones(1, K))
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert same(tables(model), before[0])
    assert not state_of(model).begun
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]
    assert torch.backends.mha.get_fastpath_enabled() == before[3]
    assert model.training
    assert not model.b.training
    assert numerics_of(model.a).ran is None
    assert _get_current_dispatch_mode() is None


def test_the_models_own_error_for_inputs_that_do_not_fit():
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        flow.record(nn.Linear(K, K), torch.ones(2, K + 1))
    with pytest.raises(fe.errors.ConversionError, match="give example_inputs"):
        flow.record(nn.Linear(K, K), None)
    with pytest.raises(fe.errors.ConversionError, match=r"takes an nn\.Module, not function"):
        flow.record(F.relu, torch.ones(1))  # pyright: ignore[reportArgumentType]
