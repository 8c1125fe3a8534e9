"""Producers: norms and activations whose results take along what layers have cast them to (autograd/produce.py).

Eager code and graphs agree in every bit, a write between a norm and its reader is seen, q, k and v share one cast, and
the tensor alone holds its operands.  Where kernels write the codes: tests/interpreted/test_interpreted_producers.py.
"""

import copy
import gc
import operator
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from probe_modules import Rms
from support import FP8_RECIPES, converted, same, tables
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import fp8engine as fe
from fp8engine.autograd import NormOf
from fp8engine.autograd.produce import activation, norm
from fp8engine.errors import GradientError
from fp8engine.ops import norm_act
from fp8engine.ops.reference import Norm
from fp8engine.scaling.operands import Producer
from fp8engine.scaling.written import _writes

K, F = 32, 48
pytestmark = pytest.mark.usefixtures("fresh")


class Three(nn.Module):
    """A norm and three layers that read it; what is called with its result when the first, or all of them, has run."""

    def __init__(self, after_first: Callable = lambda h: None):
        super().__init__()
        self.norm, self.after_first, self.at_the_end = nn.LayerNorm(K), after_first, lambda h: None
        self.q, self.k, self.v = (nn.Linear(K, 16) for _ in range(3))

    def forward(self, x):
        h = self.norm(x)
        y = self.q(h)
        self.after_first(h)
        y = y + self.k(h) + self.v(h)
        self.at_the_end(h)
        return y


def looking(look: Callable) -> Any:
    """Converted; `look` sees the norm's result at the end of each forward, and nothing of the probe's."""
    model = converted(Three())
    model.at_the_end = look
    return model


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_graph_after_eager_steps_equals_eager_code(recipe: str):
    """Eager steps tell producers who reads them, so that the graph is another one.  From the first step on: a law."""
    runs = []
    for first in (5, 2):
        torch.manual_seed(0)
        model = converted(
            nn.Sequential(Three(), nn.GELU(), nn.Linear(16, K), nn.RMSNorm(K, 1e-6), nn.Linear(K, K)), recipe
        )
        in_graph = torch.compile(model, fullgraph=True, backend="aot_eager")
        runs.append([])
        for i in range(5):
            x = torch.randn(6, K, generator=torch.Generator().manual_seed(i)).mul(2.0**i).requires_grad_()
            y = (model if i < first else in_graph)(x)
            runs[-1] += [y.detach(), *torch.autograd.grad(y.square().mean(), [x, *model.parameters()])]
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.05)
        runs[-1] += tables(model)
    assert same(*runs)


# What is written, and the same without a write in place.
WRITES: dict[str, tuple[Callable, Callable]] = {
    "add_": (lambda h: h.add_(1), lambda h: h + 1),
    "+=": (lambda h: operator.iadd(h, 1), lambda h: h + 1),
    "iadd": (lambda h: h.__iadd__(1), lambda h: h + 1),
    "setitem": (lambda h: h.__setitem__(0, 0), lambda h: torch.cat([h[:1] * 0, h[1:]])),
    "view": (lambda h: h.view(-1).mul_(2), lambda h: h * 2),
    "inplace": (nn.ReLU(inplace=True), nn.functional.relu),
    "inplace by place": (lambda h: nn.functional.relu(h, True), nn.functional.relu),
    "foreach": (lambda h: torch._foreach_add_([h], 1), lambda h: h + 1),
    "out": (lambda h: torch.add(h.detach(), 1, out=h.detach()), lambda h: h + 1),
}
ONE = torch.zeros(4, K).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(1.0)).bool()
# What moves no version counter: eager code alone, on a CPU.
UNCOUNTED: dict[str, tuple[Callable, Callable]] = {
    "data": (lambda h: h.data.mul_(2), lambda h: h * 2),
    "one element of data": (lambda h: h.data.masked_fill_(ONE, 1000.0), lambda h: h.masked_fill(ONE, 1000.0)),
    "numpy": (lambda h: h.detach().numpy().__imul__(2), lambda h: h * 2),
}


class Between(nn.Module):
    """A norm and two layers; h is written before the first, or between the two."""

    def __init__(self, write: Callable, in_place: bool, early: bool):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(K), nn.Linear(K, 16), nn.Linear(K, 16)
        self.write, self.in_place, self.early = write, in_place, early

    def written(self, h):
        made = self.write(h)
        return h if self.in_place else made

    def forward(self, x):
        h = self.norm(x)
        if self.early:
            h = self.written(h)
        y = self.first(h)
        return y, self.second(h if self.early else self.written(h))


early_or_late = pytest.mark.parametrize("early", [True, False], ids=["before the first reader", "between two"])


def between(write: str, early: bool, recipe: str = "delayed") -> list[Any]:
    """[with the write in place, with the same out of place], converted, of equal weights."""
    made = []
    for in_place, how in zip((True, False), (WRITES | UNCOUNTED)[write], strict=True):
        torch.manual_seed(0)
        made.append(converted(Between(how, in_place, early), recipe))
    return made


def assert_written(model: Any, call: Any, wanted: Any, gradients: bool) -> None:
    """Two steps of both agree: results, gradients of weights, and where autograd sees the write, of the input."""
    for i in range(2):
        x = torch.randn(4, K).mul(2.0**i)
        found = []
        for each, run in ((model, call), (wanted, wanted)):
            leaf = x.clone().requires_grad_()
            y, z = run(leaf)
            leaves = [each.first.weight, each.second.weight, *([leaf, each.norm.weight] if gradients else [])]
            found.append([y, z, *torch.autograd.grad(y.square().sum() + 2 * z.square().sum(), leaves)])
        assert same(*found)


@early_or_late
@pytest.mark.parametrize("write", [*WRITES, *UNCOUNTED])
def test_a_write_between_a_norm_and_its_reader_is_read(write, early):
    model, wanted = between(write, early)
    assert_written(model, model, wanted, gradients=write not in (*UNCOUNTED, "out"))
    assert same(tables(model)[:2], tables(wanted)[:2])


@pytest.mark.few(8)
@early_or_late
@pytest.mark.parametrize("write", WRITES)
def test_in_a_graph_too(write, early):
    model, wanted = between(write, early)
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_written(model, call, wanted, gradients=write != "out")
    assert same(tables(model)[:2], tables(wanted)[:2])


def casts_of(model: Any) -> list[torch.Size]:
    """Shapes of what a forward graph, from the first step on, casts; weights too."""
    graphs: list[Any] = []

    def keep(graph, example):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))(torch.randn(6, K))
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    found = []
    for node in nodes:  # with_effects is given the operator behind its token
        called, x = node.args[1:3] if "with_effects" in str(node.target) else (node.target, node.args[0])
        if str(called).startswith(("fp8engine.quantize", "fp8engine.cast_transpose")):
            found.append(x.meta["val"].shape)
    return found


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise"])
def test_q_k_and_v_of_one_norm_cast_it_once_in_a_graph(recipe):
    shapes = casts_of(converted(Three(), recipe))
    once = shapes.count(torch.Size([6, K]))
    assert once == (2 if recipe == "rowwise" else 1), "rows for forward, columns for wgrad; or one scale for both"
    assert shapes.count(torch.Size([16, K])) >= 3, "weights"


def test_after_a_write_each_casts_for_itself_in_a_graph():
    assert casts_of(converted(Three(lambda h: h.mul_(2)), "current")).count(torch.Size([6, K])) == 3


@pytest.mark.parametrize("grad", [False, True])
def test_the_tensor_alone_holds_its_operands(grad):
    """Freed with it by reference counts: no cycle waits for the collector."""
    alive = []

    def look(h):
        assert h.fp8, "three layers have read it"
        alive.extend(weakref.ref(value.data) for value, _ in h.fp8.values())

    model = looking(look)
    gc.collect()
    gc.disable()
    try:
        with torch.set_grad_enabled(grad):
            y = model(torch.randn(4, K))
        assert alive
        assert grad == any(reference() is not None for reference in alive), "wgrad reads them"
        if grad:
            y.sum().backward()
            assert y.grad_fn is not None
            assert all(reference() is None for reference in alive)
    finally:
        gc.enable()


def test_when_the_roots_forward_ends_a_tensor_that_is_kept_holds_none():
    kept = []
    looking(kept.append)(torch.randn(4, K))
    assert kept[0].fp8 == {}


def test_what_is_recomputed_is_made_once_for_all_that_read_it(monkeypatch):
    ran, real = [], norm_act.norm_quantize
    monkeypatch.setattr(norm_act, "norm_quantize", lambda *given: ran.append(given) or real(*given))
    layer = fe.TransformerLayer(K, F, 4, "swiglu", recipe="current", recompute="norm")
    layer(torch.randn(2, 9, K, requires_grad=True)).sum().backward()
    assert len(ran) == 2 * 2, "each norm again, once for q, k and v, once for gate and up"


def test_a_result_that_nobody_casts_is_a_plain_tensor():
    x, gamma = torch.randn(4, K, requires_grad=True), torch.ones(K)
    for y in (norm(x, NormOf(Norm("rms"), gamma), Producer()), activation(x, "gelu", Producer())):
        assert type(y) is torch.Tensor
        assert not y._is_view()
        assert (y + 1).__dict__.get("fp8") is y.view(-1).__dict__.get("fp8") is None
        assert y.detach().__dict__.get("fp8") is None


class PreActivation(nn.Module):
    """x is written after an activation has read it: torch's ReLU keeps its result and needs x no more."""

    def __init__(self, write: Callable):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(K, K), nn.ReLU(), nn.Linear(K, K)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        h = self.second(self.act(x))
        self.write(x, h)
        return x + h


@pytest.mark.parametrize("write", [lambda x, h: x.data.add_(h.data), lambda x, h: x.add_(h)], ids=["data", "in place"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_what_a_relu_has_read_may_be_written(recipe: str, write: Callable):
    model, x = PreActivation(write), torch.randn(64, K)
    runs = [converted(copy.deepcopy(model), recipe, fuse=fuse) for fuse in (None, False)]
    for each in runs:
        each(x).square().sum().backward()
    assert same(*([p.grad for p in each.parameters()] for each in runs))


def test_what_a_norm_has_read_may_not_be_written_and_the_error_says_so():
    """In place of one that keeps an FP32 copy of x, ours keeps x; the remedy works."""
    for fuse in (None, False):
        model = converted(nn.Sequential(Rms(), nn.Linear(K, K)).bfloat16(), fuse=fuse)
        x = torch.ones(4, K, dtype=torch.bfloat16, requires_grad=True) * 2
        y = model(x)
        x += y
        if fuse is None:
            with pytest.raises(GradientError, match=r"^0: .*written in place.*fe\.convert\(\.\.\., fuse=False\)"):
                x.sum().backward()
        else:
            x.sum().backward()


@pytest.mark.parametrize("part", [nn.LayerNorm(32), nn.GELU()], ids=["norm", "activation"])
def test_a_second_derivative_is_refused_with_its_remedy(part: nn.Module):
    """Though no FP8 matmul is involved; the remedy works."""
    for fuse in (None, False):
        model = converted(nn.Sequential(copy.deepcopy(part), nn.Linear(32, 1)), "current", fuse=fuse)
        h = torch.randn(4, 32, requires_grad=True)
        run = model[0](h).square().sum()  # behind it nothing of ours
        if fuse is None:
            with pytest.raises(GradientError, match=r"create_graph=True.*fe\.convert\(\.\.\., fuse=False\)"):
                torch.autograd.grad(run, h, create_graph=True)
        else:
            (g,) = torch.autograd.grad(run, h, create_graph=True)
            g.square().sum().backward()
            assert h.grad is not None


FUNCTIONS = {
    True: (operator.iadd, operator.iand, operator.setitem, torch.Tensor.add_, torch._foreach_mul_),
    False: (operator.and_, operator.or_, operator.not_, operator.is_, torch.add, torch.Tensor.masked_fill),
}
METHODS = {True: ("add_", "__iand__", "__setitem__", "masked_fill_"), False: ("__and__", "masked_fill", "__getitem__")}


@pytest.mark.parametrize("writes", [True, False])
def test_what_writes_is_told_from_what_is_named_alike(writes: bool):
    nodes = [("call_function", each) for each in FUNCTIONS[writes]] + [
        ("call_method", each) for each in METHODS[writes]
    ]
    for op, target in nodes:
        assert _writes(SimpleNamespace(op=op, target=target, args=(), kwargs={})) == writes, target


def test_a_mask_that_is_joined_to_another_takes_no_codes_away():
    """`mask & causal` stands between the norm and the MLP of a parallel block: its graph computes what eager code does.

    Under "fp8" with `recompute` gradients of the MLP's weights are of the norm of x as FP8 stores it, 2.6 % from those
    of x itself, which a graph kept where it took `&` for a write.
    """
    torch.manual_seed(0)
    heads = fe.Heads(2, of_keys=1, width=8, causal=True)
    options: dict[str, Any] = {"norm": "rms", "placement": "parallel shared", "recompute": True, "store": "fp8"}
    plain = fe.TransformerLayer(32, 64, heads, "swiglu", True, recipe="rowwise_gw_hp", **options)
    traced = copy.deepcopy(plain)
    x, mask = torch.randn(2, 5, 32, dtype=torch.bfloat16).float(), torch.arange(5) < torch.tensor([[5], [3]])
    for run in (plain, torch.compile(traced, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            run(x, mask=mask).square().mean().backward()
    for (name, one), other in zip(plain.named_parameters(), traced.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # pyright: ignore[reportArgumentType]
