"""flow.record: each kind of consumer, what is looked through, what is inside our modules, and nothing left behind."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overflow_cases import Part
from support import converted, numerics_of, same, state_of, tables
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

import fp8engine as fe
from fp8engine.report import flow
from fp8engine.report.flow import Consumer

K = 8
Function = Callable[[Any, torch.Tensor], Any]


class Model(nn.Module):
    """Layers a, b and c, a norm and a vector, joined by `function(self, x)`."""

    def __init__(self, function: Function, width: int = K):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(K, width), nn.Linear(K, K), nn.Linear(K, K)
        self.norm, self.vector = nn.LayerNorm(K), nn.Parameter(torch.ones(K))
        self.register_buffer("mask", torch.ones(4, 4))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def recorded(function: Function, width: int = K) -> flow.Flow:
    return flow.record(Model(function, width), torch.randn(2, 4, K))


def reading(function: Function, layer: str = "a", width: int = K) -> list[tuple[str, str]]:
    """Kind and name of what reads a layer's output."""
    return [(consumer.kind, consumer.name) for consumer in recorded(function, width).layers[layer].consumers]


def rope(q: torch.Tensor) -> torch.Tensor:
    angle = torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    rotated = torch.cat([-q[..., 2:], q[..., :2]], -1)
    return q * angle.cos() + rotated * angle.sin()


def by_hand(m, x):
    """LayerNorm without torch's."""
    y = m.a(x)
    centred = y - y.mean(-1, keepdim=True)
    return m.b(centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * m.vector)


def rms_by_hand(m, x):
    y = m.a(x).float()
    return m.b(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * m.vector)


def tanh_gelu(m, x):
    y = m.a(x)
    return m.b(0.5 * y * (1 + torch.tanh(0.8 * (y + 0.04 * torch.pow(y, 3)))))


def swiglu(m, x):
    gate, up = m.a(x).chunk(2, -1)
    return m.b(F.silu(gate) * up)


def attention(m, x):
    q, k, v = (layer(x).view(2, 4, 2, 4).transpose(1, 2) for layer in (m.a, m.b, m.c))
    scores = rope(q) @ rope(k).transpose(-1, -2) / 2 + m.mask.log()
    return scores.softmax(-1) @ v


def cached(m, x):
    cache = torch.zeros(2, 8, K)
    cache[:, 2:6] = m.a(x)
    return m.b(torch.relu(cache))


def written(m, x, into=slice(None)):
    """a's result, of which b's takes the place of some or all."""
    y = m.a(x)
    y[into] = m.b(x)[into]
    return F.silu(y)


def in_place_sum(m, x):
    y = m.norm(x)
    y += m.a(x)
    return m.b(y)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda m, x: m.b(m.a(x)), [("matmul", "b")]),
        (lambda m, x: m.b(F.gelu(m.a(x))), [("activation", "aten.gelu")]),
        (lambda m, x: m.b(m.a(x).relu_()), [("activation", "aten.relu")]),
        (lambda m, x: m.norm(m.a(x)), [("norm", "norm")]),
        (lambda m, x: F.layer_norm(m.a(x), (K,)), [("norm", "aten.native_layer_norm")]),
        (lambda m, x: x + m.a(x), [("residual", "aten.add")]),
        (lambda m, x: m.a(x) - m.b(x), [("residual", "aten.sub")]),
        (in_place_sum, [("residual", "aten.add")]),
        (lambda m, x: m.a(x), [("output", "output")]),
        (lambda m, x: m.a(x).softmax(-1), [("softmax", "softmax")]),
        (lambda m, x: m.a(x) * m.b(x), [("activation", "aten.mul")]),
        (lambda m, x: F.mse_loss(m.a(x), x), [("loss", "aten.mse_loss")]),
        (lambda m, x: (m.a(x) - x).pow(2).mean(), [("loss", "aten.mean")]),
        (lambda m, x: (m.a(x) - x).abs().mean(), [("loss", "aten.mean")]),
        (lambda m, x: -(m.a(x).softmax(-1) + 1e-6).log().mean(), [("loss", "aten.mean")]),
        (lambda m, x: m.b((m.a(x) - x).abs()).mean(), [("residual", "aten.sub")]),
        (lambda m, x: (m.a(x).mean(), m.a(x).mean(-1)), [("loss", "aten.mean"), ("unknown", "aten.mean")]),
        (lambda m, x: F.mse_loss(x + m.a(x), x), [("residual", "aten.add")]),
        (lambda m, x: F.mse_loss(m.a(x).sigmoid(), x), [("activation", "aten.sigmoid")]),
        (lambda m, x: F.cross_entropy(m.a(x)[:, :-1].flatten(0, 1).float(), torch.zeros(6, dtype=torch.long)),
         [("loss", "aten.nll_loss_forward")]),
        (lambda m, x: m.a(x).log_softmax(-1), [("softmax", "log_softmax")]),
        (lambda m, x: m.a(x).cumsum(0), [("unknown", "aten.cumsum")]),
        (cached, [("activation", "aten.relu")]),
        (lambda m, x: F.silu(m.a(x).zero_()), []),
        (written, []),
        (lambda m, x: written(m, x, slice(0, 1)), [("activation", "aten.silu")]),
        (lambda m, x: (m.a(x), x)[1], []),
        (lambda m, x: (m.a(x).isnan().any().item(), x)[1], []),
        (lambda m, x: F.linear(m.a(x), m.b.weight, m.b.bias), [("matmul", "b")]),
        (lambda m, x: m.a(x) @ torch.ones(K, K), [("matmul", "aten.mm")]),
        (lambda m, x: F.conv1d(m.a(x), torch.ones(4, 4, 1)), [("matmul", "aten.convolution")]),
    ],
)  # fmt: skip
def test_who_reads(function: Function, wanted: list[tuple[str, str]]):
    assert reading(function) == wanted


@pytest.mark.parametrize(
    "through",
    [
        lambda m, y: y.view(8, K).t().contiguous().t().reshape(2, 4, K),
        lambda m, y: y.to(torch.bfloat16).float(),
        lambda m, y: F.dropout(y, 0.5, training=True),
        lambda m, y: torch.cat(y.split(3, -1), -1),
        lambda m, y: torch.stack(y.chunk(2), 1).flatten(0, 1)[:, 0],
        lambda m, y: y[torch.tensor([1, 0])][..., 1:],
        lambda m, y: F.pad(y, (0, 1)),
        lambda m, y: y.clone() * 2.0 / torch.tensor(3.0) + 1,
        lambda m, y: y + m.vector,
        lambda m, y: (y * m.vector).masked_fill(torch.ones(4, K, dtype=torch.bool), 0.0),
        lambda m, y: torch.zeros(2, 4, K).index_copy_(0, torch.tensor([0, 1]), y),
        lambda m, y: torch.zeros_like(y).copy_(y),
        lambda m, y: y.unflatten(-1, (2, 4)).transpose(1, 2).expand(2, 2, 4, 4).permute(0, 2, 1, 3),
        lambda m, y: rope(y.view(2, 4, 2, 4).transpose(1, 2)),
        lambda m, y: y.masked_scatter(torch.ones(2, 4, K, dtype=torch.bool), m.vector.repeat(8)),
    ],
)
def test_what_is_looked_through(through: Function):
    assert reading(lambda m, x: F.silu(through(m, m.a(x)))) == [("activation", "aten.silu")]


@pytest.mark.parametrize(
    ("function", "width", "kind"),
    [(by_hand, K, "norm"), (rms_by_hand, K, "norm"), (tanh_gelu, K, "activation"), (swiglu, 2 * K, "activation")],
)
def test_a_norm_or_an_activation_of_several_operations_is_one(function: Function, width: int, kind: str):
    layers = recorded(function, width).layers
    assert layers["a"].kinds == (kind,)
    assert [producer.kind for producer in layers["b"].producer] == [kind]


def test_attention_written_out():
    found = recorded(attention)
    for name in "abc":
        assert found.layers[name].consumers == (Consumer("softmax", "attention"),)
        assert len(found.layers[name].shares_input_with) == 2
    assert [node.kind for node in found.nodes].count("attention") == 1


def test_a_fused_qkv():
    def function(m, x):
        q, k, v = m.a(x).view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return m.b(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))

    layers = recorded(function, 3 * K).layers
    assert layers["a"].consumers == (Consumer("softmax", "attention"),)
    assert layers["b"].producer == (Consumer("attention", "attention"),)


def test_torchs_own_attention_and_encoder():
    model = nn.TransformerEncoderLayer(K, 2, 16, batch_first=True)
    layers = flow.record(model, torch.randn(2, 4, K)).layers
    assert layers["self_attn.in_proj_weight"].consumers == (Consumer("softmax", "attention", "self_attn"),)
    assert layers["self_attn.out_proj"].kinds == ("residual",)
    assert layers["linear1"].kinds == ("activation",)
    assert [made.name for made in layers["linear1"].producer] == ["norm1"]


def test_a_tied_weight_belongs_to_the_module_that_runs():
    head: Any = Part(lambda x: F.linear(x, head.weight))
    embedding = nn.Embedding(5, K)
    head.weight = embedding.weight
    layers = flow.record(nn.Sequential(embedding, head), torch.tensor([[1, 2]])).layers
    assert {name: layer.kinds for name, layer in layers.items()} == {"1": ("output",)}
    assert layers["1"].producer == (Consumer("embedding", "0"),)


def test_where_no_numbers_are_and_where_gradients_never_were():
    with torch.device("meta"):
        model, x = Model(lambda m, x: m.b(F.gelu(m.a(x)))), torch.ones(1, 4, K)
    assert flow.record(model, x).layers["a"].kinds == ("activation",)
    with torch.inference_mode():
        x = torch.ones(1, 4, K)
    assert recorded(lambda m, x: m.b(F.gelu(m.a(x)))) == flow.record(Model(lambda m, x: m.b(F.gelu(m.a(x)))), x)


def test_under_autocast_and_under_compile():
    plain, model = recorded(swiglu, 2 * K), Model(swiglu, 2 * K)
    with torch.autocast("cpu", torch.bfloat16):
        assert flow.record(model, torch.randn(2, 4, K)) == plain
    model.compile(backend="eager")
    assert flow.record(model, torch.randn(2, 4, K)) == plain


def test_recorded_forward_computes_what_a_plain_one_does():
    seen = []
    mixed = lambda m, x: m.b(by_hand(m, x) + attention(m, x).transpose(1, 2).flatten(-2))  # noqa: E731
    model, x = Model(lambda m, x: seen.append(mixed(m, x))).eval(), torch.randn(2, 4, K)
    flow.record(model, x)
    with torch.no_grad():
        model(x)
    assert torch.equal(*seen)


def test_a_layer_named_like_a_part_of_a_loss_is_a_layer():
    log = nn.Linear(K, K)
    found = flow.record(Part(lambda x: F.mse_loss(log(x), x), log=log), torch.randn(2, K))
    assert [str(node) for node in found.nodes] == ["input [0]", "matmul log", "loss aten.mse_loss", "output output"]


def test_a_layer_called_twice():
    layer = recorded(lambda m, x: m.norm(m.a(F.relu(m.a(x))))).layers["a"]
    assert layer.calls == 2
    assert layer.consumers == (Consumer("activation", "aten.relu"), Consumer("norm", "norm"))
    assert [made.kind for made in layer.producer] == ["input", "activation"]


def test_layers_that_read_one_tensor():
    """A view is the same tensor; one that is written between two readers is not."""

    def function(m, x):
        y = m.norm(x)
        return m.a(y) + m.b(y.view(8, K)).view(2, 4, K), m.c(y.add_(1.0))

    layers = recorded(function).layers
    assert [layers[name].shares_input_with for name in "abc"] == [("b",), ("a",), ()]


def test_outputs_in_dataclasses_dicts_and_lists():
    result = dataclasses.make_dataclass("result", ["scores", "more"])
    layers = recorded(lambda m, x: result(m.a(x), {"b": [m.b(x), 3, None]})).layers
    assert [(c.kind, c.name) for c in layers["a"].consumers] == [("output", "scores")]
    assert [(c.kind, c.name) for c in layers["b"].consumers] == [("output", "more.b[0]")]
    assert (layers["c"].calls, layers["c"].consumers) == (0, ())


def test_an_output_that_holds_itself():
    held = dataclasses.make_dataclass("held", ["scores", "back"])

    def forward(m, x):
        result, parts = held(m.a(x), None), [m.b(x)]
        result.back = parts
        parts += [parts, {"result": result}]
        return result

    layers = recorded(forward).layers
    assert [[c.name for c in layers[name].consumers] for name in "ab"] == [["scores"], ["back[0]"]]


@pytest.mark.parametrize("given", [torch.ones(1, 4, K), (torch.ones(1, 4, K),), [torch.ones(1, 4, K)], "keywords"])
def test_inputs_as_convert_takes_them(given: Any):
    given = {"x": torch.ones(1, 4, K)} if given == "keywords" else given
    (made,) = flow.record(Model(lambda m, x: m.a(x)), given).layers["a"].producer
    assert made == Consumer("input", "x" if isinstance(given, dict) else "[0]")


def test_fused_modules_say_what_is_inside():
    attention = fe.Attention(32, 4, recipe="current")
    linear = fe.LayerNormLinear(32, 32, recipe="current")
    mlp = fe.LayerNormMLP(32, 64, "swiglu", recipe="current", norm="rms")

    def forward(x):
        x = x + attention(x)
        return x + mlp(torch.tanh(linear(x)))

    model = Part(forward, attention=attention, first=linear, mlp=mlp)
    layers = flow.record(model, torch.randn(2, 4, 32)).layers
    for name in ("q_proj", "k_proj", "v_proj"):
        assert layers[f"attention.{name}"].kinds == ("softmax",)
    assert [made.kind for made in layers["attention.o_proj"].producer] == ["attention"]
    assert layers["first.linear"].producer == (Consumer("norm", "first.norm"),)
    assert layers["first.linear"].consumers == (Consumer("activation", "aten.tanh"),)
    assert layers["mlp.gate_up"].producer == (Consumer("norm", "mlp.norm"),)
    assert layers["mlp.gate_up"].consumers == layers["mlp.down"].producer == (Consumer("activation", "mlp.swiglu"),)
    assert layers["mlp.down"].kinds == ("residual",)


def test_experts_in_one_module():
    up, down = (fe.GroupedLinear(2, 32, 32, recipe="rowwise") for _ in range(2))
    model = Part(lambda x: down(F.gelu(up(x, [3, 1])), [3, 1]), up=up, down=down)
    layers = flow.record(model, torch.randn(4, 32)).layers
    assert layers["up"].consumers == layers["down"].producer == (Consumer("activation", "aten.gelu"),)
    assert layers["down"].kinds == ("output",)


def test_nothing_is_left_behind_even_where_the_forward_fails():
    def fails(m, x):
        m.a(torch.rand(1, K))
        random.random()
        raise ArithmeticError("the model's own")

    def left() -> list:
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        return [hooks, random.getstate(), torch.backends.mha.get_fastpath_enabled(), _get_current_dispatch_mode()]

    model = converted(Model(fails), "delayed")
    model.b.eval()
    before, others = [*tables(model), torch.get_rng_state()], left()
    with pytest.raises(ArithmeticError, match="the model's own"):
        flow.record(model, torch.ones(1, K))
    assert same([*tables(model), torch.get_rng_state()], before)
    assert left() == others
    assert not state_of(model).begun
    assert (model.training, model.b.training, numerics_of(model.a).ran) == (True, False, None)


def test_a_model_that_is_one_layer_and_what_is_refused():
    assert flow.record(nn.Linear(K, K), torch.ones(1, K)).layers[""].kinds == ("output",)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        flow.record(nn.Linear(K, K), torch.ones(2, K + 1))
    with pytest.raises(fe.errors.ConversionError, match="give example_inputs"):
        flow.record(nn.Linear(K, K), None)
    with pytest.raises(fe.errors.ConversionError, match=r"takes an nn\.Module, not function"):
        flow.record(F.relu, torch.ones(1))  # pyright: ignore[reportArgumentType]
