"""Attention that fe.convert is asked to put in FP8: nothing stays in 16 bits or has other gradients without a word."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from attention_models import Model, Plain, llama, near, step, x_of
from support import same
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.convert import attention as attending
from fp8engine.errors import AttentionWarning, StrictError

pytestmark = pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")


class Calls(nn.Module):
    """Attention of tensors that are given."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)


def calls() -> Any:
    """A converted `Calls`, beside the layer that fe.convert wants."""
    return asked_for(nn.ModuleDict({"attn": Calls(), "linear": nn.Linear(16, 16)}))["attn"]


def asked_for(model: nn.Module, asked: str = "fp8") -> Any:
    return fe.convert(model, "bf16", attention=asked)


def ran(model: nn.Module) -> list[str]:
    return [row["ran"] for row in fe.inspect(model).attention]


def test_one_head_of_keys_that_torch_broadcasts_is_shared():
    q, k = torch.randn(2, 4, 9, 64), torch.randn(2, 1, 9, 64)
    attn = calls()
    assert 0 < near(attn(q, k, k, is_causal=True), F.scaled_dot_product_attention(q, k, k, is_causal=True)) < 0.05
    assert attn.fp8_softmax.ran == "fp8"
    with pytest.raises(RuntimeError):  # torch's own words: groups need enable_gqa
        attn(q, k.expand(2, 2, 9, 64), k.expand(2, 2, 9, 64))
    shared = attn(q, k.expand(2, 2, 9, 64), k.expand(2, 2, 9, 64), enable_gqa=True, is_causal=True)
    assert torch.equal(shared, attn(q, k, k, is_causal=True))


NO_HEADS, UNEVEN = r"FP8 attention takes \[batch, heads, T, D\]", "heads that share those of k evenly"


# A scale that is not positive without causality: with it torch's kernel for a CPU gives -Inf times the scale, NaN.
@pytest.mark.parametrize(
    ("q", "k", "scale", "why"),
    [
        ((3, 5, 64), (3, 7, 64), None, NO_HEADS),
        ((2, 1, 5, 64), (2, 4, 7, 64), None, UNEVEN),
        ((2, 4, 5, 64), (1, 4, 7, 64), None, UNEVEN),
        ((2, 4, 5, 32), (2, 4, 7, 32), None, "heads of 32 columns; FP8 attention takes 64, 96 or 128"),
        ((2, 4, 5, 64), (2, 4, 7, 64), 0.0, "a scale of 0 for the scores"),
        ((2, 4, 5, 64), (2, 4, 7, 64), -0.125, "a scale of -0.125 for the scores"),
    ],
)
def test_nothing_is_left_in_16_bits_without_a_word(q: tuple, k: tuple, scale: float | None, why: str):
    given = [torch.randn(size, requires_grad=True) for size in (q, k, k)]
    attn = calls()
    with pytest.warns(AttentionWarning, match=why):
        found = attn(*given, scale=scale)
    wanted = F.scaled_dot_product_attention(given[0], given[1], given[2], scale=scale)
    assert torch.equal(found, wanted)
    assert same(*(torch.autograd.grad(y.sum(), given) for y in (found, wanted)))
    assert (attn.fp8_softmax.ran, attn.fp8_softmax.why != "") == ("16 bits", True)


# Without heads torch 2.11's own attention divides by their number, which ends the process.
HEADLESS = [(2, 0, 3)] if torch.__version__ >= "2.13" else []


@pytest.mark.parametrize("shape", [(0, 2, 3), *HEADLESS, (2, 2, 0)], ids=str)
@pytest.mark.parametrize("keys", [0, 3])
def test_nothing_to_attend_to_gives_what_torch_gives(shape: tuple, keys: int):
    q, k = (torch.ones(*size, 64, requires_grad=True) for size in (shape, (*shape[:2], keys)))
    found, wanted = calls()(q, k, k), F.scaled_dot_product_attention(q, k, k)
    assert torch.equal(found, wanted)
    grads, theirs = (torch.autograd.grad(y.sum(), [q, k], materialize_grads=True) for y in (found, wanted))
    assert torch.equal(grads[0], torch.zeros_like(q))
    assert torch.equal(grads[1], theirs[1])


def test_autocast_decides_the_dtype_as_it_does_for_torchs_attention():
    q, v = torch.randn(1, 2, 9, 64), torch.randn(1, 2, 9, 64, dtype=torch.bfloat16)
    attn = calls()
    with torch.autocast("cpu", torch.bfloat16):
        assert attn(q, q, q).dtype == torch.bfloat16
        assert attn(q, q, v).dtype == torch.bfloat16  # what a rotation in FP32 leaves
    assert attn.fp8_softmax.ran == "fp8"
    assert attn(q, q, q).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transforms_and_nested_tensors_run_in_16_bits():
    fp8, plain = (asked_for(Model(), asked) for asked in ("fp8", "16 bits"))
    x = x_of(9)
    with pytest.warns(AttentionWarning, match=r"a transform of torch\.func"):
        found = torch.func.grad(lambda x: fp8(x).square().sum())(x)
    assert torch.equal(found, torch.autograd.grad(plain(x.requires_grad_()).square().sum(), x)[0])
    nested = torch.nested.nested_tensor([torch.randn(5, 64), torch.randn(7, 64)], layout=torch.jagged)
    q = nested.unflatten(-1, (1, 64)).transpose(1, 2)
    attn = calls()
    with pytest.warns(AttentionWarning, match="nested tensors"):
        assert torch.equal(attn(q, q, q).values(), F.scaled_dot_product_attention(q, q, q).values())


class Inside(Plain):
    """A checkpoint of the softmax alone, within the module's forward."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)

        def attend(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        found: Any = checkpoint(attend, q, k, v, use_reentrant=self.reentrant)
        return self.out(found.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_of_the_module_has_the_gradients_of_what_ran(reentrant: bool):
    """Its recompute runs torch's attention; what FP8 saves of q, k and v is not what torch saves, in another order."""
    plain = Inside()
    plain.reentrant = reentrant
    model, of_16_bits = (asked_for(nn.Sequential(copy.deepcopy(plain)), asked) for asked in ("fp8", "16 bits"))
    with pytest.warns(AttentionWarning, match="a checkpoint begins inside of the module's forward"):
        found = step(model, x_of())
    assert same(found, step(of_16_bits, x_of()))
    with torch.no_grad(), warnings.catch_warnings():  # nothing is computed again
        warnings.simplefilter("ignore")  # torch's, of inputs without a gradient
        model(x_of())
    assert ran(model) == ["fp8"]


class Twice(nn.Module):
    """One block, used three times under checkpoints."""

    def __init__(self):
        super().__init__()
        self.block = Plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + checkpoint(self.block, x, use_reentrant=False)  # pyright: ignore[reportOperatorIssue]
        return x


def test_auto_decides_nothing_between_a_forward_and_its_backward():
    """A checkpoint saves other tensors in FP8 than in 16 bits, and torch refuses a recompute that saves others."""
    torch.manual_seed(0)
    model, x = asked_for(Twice(), "auto"), x_of().requires_grad_()
    (model(x).sum() + model(x).sum()).backward()
    assert model.block.fp8_softmax.ran == "16 bits"
    model(x)  # an answer that is dropped holds nothing up
    model(x).sum().backward()
    assert model.block.fp8_softmax.ran == "fp8"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_whose_attention_is_set_to_another_is_said(compiled: bool):
    model, ids = asked_for(llama()), torch.arange(8).view(1, 8)
    model.set_attn_implementation("eager")
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    with pytest.warns(AttentionWarning, match="has not called torch's scaled_dot_product_attention"):
        run(ids)
    (row,) = fe.inspect(model).attention
    assert (row["ran"], 'attn_implementation="sdpa"' in row["why"]) == ("16 bits", True)
    model.model.layers[0].self_attn.fp8_softmax.strict = True
    with pytest.raises(StrictError, match="has not called torch's"):
        model(ids)
    model.set_attn_implementation("sdpa")
    model.model.layers[0].self_attn.fp8_softmax.strict = False
    model(ids)
    assert ran(model) == ["fp8"]


def test_multihead_attention_beside_another_is_said_and_reported():
    model: Any = nn.ModuleDict({"plain": Plain(), "torch": nn.MultiheadAttention(128, 2)})
    with pytest.warns(AttentionWarning, match=r"torch: attention runs in 16 bits: nn\.MultiheadAttention calls"):
        fe.convert(model, "bf16", attention="fp8")
    assert [(row["name"], row["ran"]) for row in fe.inspect(model).attention] == [("plain", ""), ("torch", "16 bits")]
    fe.revert(model)
    assert fe.inspect(model).attention == ()
    assert type(model["torch"]) is nn.MultiheadAttention


def test_a_forward_that_was_set_on_the_instance_is_said():
    model: Any = Model()
    model.first.forward = functools.partial(Plain.forward, model.first)
    model.second.forward = model.second.forward  # the class's own, as Accelerate keeps it
    with pytest.warns(AttentionWarning, match="first: attention runs in 16 bits: a forward of its own was set"):
        fe.convert(model, "bf16", attention="fp8")
    model(x_of())
    assert ran(model) == ["16 bits", "fp8"]
    fe.revert(model)
    with pytest.raises(StrictError, match="a forward of its own was set"):
        attending.put([("first", model.first)], "fp8", strict=True)


def test_emulation_is_reported_of_a_graph_too():
    model = asked_for(nn.Sequential(Plain()))
    torch.compile(model, fullgraph=True, backend="aot_eager")(x_of())
    (row,) = fe.inspect(model).attention
    assert (row["ran"], row["why"]) == ("fp8", "emulated")


class Named(Plain):
    """With a softmax of its own, for some calls."""

    def __init__(self):
        super().__init__()
        self.softmax = nn.Softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.softmax(x)) if x.shape[1] > 1 else F.scaled_dot_product_attention(x, x, x)


def test_a_softmax_of_the_modules_own_is_not_hidden():
    plain, x = Named(), x_of()
    model = asked_for(nn.Sequential(copy.deepcopy(plain)))
    with torch.no_grad():
        assert 0 < near(model(x), plain(x)) < 0.2
    assert type(model[0].softmax) is nn.Softmax
    fe.revert(model)
    assert (type(model[0].softmax), fe.inspect(model).attention) == (nn.Softmax, ())


class Around(Plain):
    """Attention of its own around another's, which takes a mask first."""

    def __init__(self):
        super().__init__()
        self.inner = Plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        q = x[:, None, :, :64]
        return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("asked", ["fp8", "auto"])
def test_the_attention_of_a_module_within_another_is_its_own(asked: str):
    model: Any = Around()
    model.inner.options = {"attn_mask": torch.ones(70, 70, dtype=torch.bool)}
    fe.convert(model, "bf16", attention=asked)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(x_of())
    said = [str(each.message) for each in caught if each.category is AttentionWarning]
    assert [text.split(":")[0] for text in said] == ["inner"]
    assert ran(model) == ["fp8", "16 bits"]
    assert (model.fp8_softmax.forwards, model.inner.fp8_softmax.forwards) == ((3, 0) if asked == "auto" else (0, 0))
