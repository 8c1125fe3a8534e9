"""Producers on the triton backend, which writes codes beside results: they are a cache, and change no number."""

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from autograd.test_produce import UNCOUNTED, WRITES, K, assert_written, between
from contracts import in_bytes
from scenarios import INNER, Gated, Siblings
from support import DTYPES, FP8_RECIPES, converted, same, tables
from torch import nn

import fp8engine as fe
from fp8engine.autograd import NormOf, produce
from fp8engine.autograd.operands import matrix
from fp8engine.ops import casts
from fp8engine.ops.reference import Norm, Store
from fp8engine.ops.reference.cast_transpose import IN_16_BITS
from fp8engine.scaling.operands import Producer


def every_producer() -> nn.Module:
    """A norm that three layers read, one before a gated MLP, one before a plain one."""
    return nn.Sequential(
        Siblings(nn.LayerNorm(K)),
        nn.Sequential(nn.RMSNorm(K, eps=1e-6), Gated()),
        nn.Sequential(nn.LayerNorm(K), nn.Linear(K, INNER), nn.GELU(), nn.Linear(INNER, K)),
    )


PRODUCERS = ["0.norm", "1.0", "1.1", "2.0", "2.2"]


def block(recipe: str = "current", dtype: torch.dtype = torch.float32) -> Any:
    """The same weights every time, converted."""
    torch.manual_seed(0)
    model = converted(every_producer().to(dtype), recipe)
    assert [name for name, m in model.named_modules() if type(m).__name__.startswith("Producing")] == PRODUCERS
    return model


def steps(model: Any, calls: list[Any], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Results and gradients of a step through each of the calls, weights and inputs growing; at the end the tables."""
    found = []
    for i, call in enumerate(calls):
        model.zero_grad()
        x = torch.randn(2, 9, K, generator=torch.Generator().manual_seed(i)).mul(2.0**i).to(dtype).requires_grad_()
        y = call(x)
        y.float().square().mean().backward()
        found += [y.detach(), x.grad, *(p.grad for p in model.parameters())]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.05)
    return found + tables(model)


@pytest.fixture(autouse=True)
def kernels():
    with fe.backend("triton"):
        yield


def layer_norm(x, producer: Producer, reader) -> torch.Tensor:
    width = x.shape[-1]
    gamma, beta = torch.linspace(0.5, 2, width).to(x.dtype), torch.linspace(-1, 1, width).to(x.dtype)
    return produce.norm(x, NormOf(Norm("layer", 1e-5), gamma, beta), producer, reader=reader)


# What is made of x [..., 2 width], in `width` columns.
MADE: dict[str, Any] = {
    "norm": lambda x, *of: layer_norm(x[..., ::2], *of),
    "plain": lambda x, *of: produce.activation(x[..., ::2].contiguous(), "gelu", of[0], reader=of[1]),
    "gated": lambda x, *of: produce.activation(x, "swiglu", of[0], reader=of[1]),
    "gate and up": lambda x, *of: produce.activation(x[..., ::2], "geglu", of[0], up=x[..., 1::2], reader=of[1]),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_what_is_written_beside_a_result_is_its_cast(recipe, kind, dtype):
    """In a step that has a prediction, which does not hold; codes, scales, and the layer's tables."""
    for shape in ((3, 5, 33), (7, 130)):
        reader = fe.Linear(shape[-1], 16, recipe=recipe, dtype=dtype)
        reader(torch.randn(8, shape[-1], dtype=dtype)).sum().backward()
        other = copy.deepcopy(reader)
        y = MADE[kind](4 * torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype), Producer(), reader.numerics)
        of = other.numerics.recipe
        how, both = of.forward[0], of.input_serves_both
        assert set(y.fp8) == {how.text, *[how.text_of_transpose] * both}
        other.numerics.state.enter()  # as the producer has begun the step
        with torch.no_grad():
            cast = casts.cast_transpose if both else casts.quantize
            made = cast(matrix(y), how, other.numerics.slot("input", True))
        found = [y.fp8[key][0] for key in (how.text, how.text_of_transpose)[: 1 + both]]
        assert in_bytes(found) == in_bytes(made)
        assert same(tables(reader), tables(other))


def trained(monkeypatch, model: Any, granted: bool, dtype: torch.dtype) -> tuple[list[torch.Tensor], Counter]:
    """What `steps` of the model give, and how often codes were granted."""
    count = Counter()

    def asked(name: str, real: Any, *given: Any) -> Store:
        to = real(*given) if granted else IN_16_BITS
        count[name] += to.cast is not None
        return to

    with monkeypatch.context() as patch:
        for name in ("codes_for", "codes_of_gradient"):
            patch.setattr(produce, name, partial(asked, name, getattr(produce, name)))
        return steps(model, [model] * 3, dtype), count


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [*((recipe, torch.bfloat16) for recipe in FP8_RECIPES), ("delayed", torch.float32), ("current", torch.float16)],
    ids=str,
)
def test_training_is_the_same_whether_codes_are_written_or_not(recipe, dtype, monkeypatch):
    found, granted = trained(monkeypatch, block(recipe, dtype), True, dtype)
    wanted, none = trained(monkeypatch, block(recipe, dtype), False, dtype)
    assert same(found, wanted), "results, gradients, history, live values and counters"
    assert not none.total()
    # Three norms and two activations in the two steps after the first, which tells them who reads; the gated MLP knows
    # its reader from the start.  The plain activation's backward writes, where one cast serves dgrad and wgrad.
    assert granted["codes_for"] == 2 * 5 + 1
    assert granted["codes_of_gradient"] == (2 if recipe != "rowwise_gw_hp" else 0)


def test_codes_that_nobody_reads_are_written_a_few_times():
    x, producer, reader = torch.randn(4, K), Producer(), fe.Linear(K, 16, recipe="current")
    reader(layer_norm(x, producer, None))
    made = [layer_norm(x, producer, None) for _ in range(Producer.MOST_UNREAD + 5)]
    assert [len(y.fp8) > 0 for y in made] == [True] * Producer.MOST_UNREAD + [False] * 5
    reader(made[-1])
    assert layer_norm(x, producer, None).fp8, "a layer has read one"


@pytest.mark.parametrize("write", [*WRITES, *UNCOUNTED])
def test_codes_written_before_a_write_are_not_read(write):
    """Under delayed scaling their amax stays in the history: then a write of less is cast for more than there is."""
    model, wanted = between(write, early=True, recipe="current")
    for each in (model, wanted):
        each(torch.randn(4, K, generator=torch.Generator().manual_seed(1)))[0].sum().backward()  # tells who reads
    assert model.norm.recognised.producer.reader is not None
    assert_written(model, model, wanted, gradients=write not in (*UNCOUNTED, "out"))


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_what_is_recomputed_changes_no_bit(recipe):
    torch.manual_seed(0)
    plain = fe.TransformerLayer(K, 48, 4, "swiglu", recipe=recipe)
    again = fe.TransformerLayer(K, 48, 4, "swiglu", recipe=recipe, recompute=True)
    again.load_state_dict(plain.state_dict())
    assert same(steps(again, [again] * 2), steps(plain, [plain] * 2))
