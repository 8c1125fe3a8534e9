"""fe.smooth on models: a planted late outlier, gated MLPs, copies; what it refuses; the remedy that alarms propose."""

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models as tiny
import torch
from hf_families import FAMILIES
from late_outlier import CHANNEL, MLP, batch, grown, ordinary_tokens
from probe_modules import Gated, Packed, TimmSwiGlu
from support import Net, converted, sqnr, state_of
from torch import nn
from torch.nn import functional as F

import fp8engine as fe
from fp8engine.autograd.features import RANKS
from fp8engine.autograd.smooth import Smooth
from fp8engine.convert.outliers import gated
from fp8engine.distributed.sharded_weight import not_as_codes
from fp8engine.errors import ConversionError, UnknownName
from fp8engine.report.state import controllers_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
WIDTH = 32


def llama(fuse: bool, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return converted(tiny.llama().to(dtype), "current", fuse=fuse)


def mlp(recipe: str = "current", **options: Any) -> Any:
    torch.manual_seed(0)
    return fe.LayerNormMLP(WIDTH, 2 * WIDTH, "swiglu", recipe=recipe, **options)


def block(recipe: str = "current") -> fe.TransformerLayer:
    torch.manual_seed(0)
    return fe.TransformerLayer(WIDTH, 2 * WIDTH, 4, "swiglu", recipe=recipe)


def given(rows: int = 24) -> torch.Tensor:
    return torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def results(model: nn.Module, x: torch.Tensor) -> list[Any]:
    model.zero_grad()
    x.grad = None
    y = model(x)
    y.square().mean().backward()
    return [y, x.grad, *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


def test_a_planted_late_outlier_and_none():
    """The channel ends 2^16 times the others' median: x's codes are subnormal without smooth, 7 dB; with it 24 dB.

    Deterministic on one machine; 1.5 dB are for CPUs that round sums otherwise.  Without an outlier nothing is lost:
    what both lose to E4M3's 3 bits of mantissa is 29.5 dB.
    """
    (plain, smoothed), (ordinary, same) = (
        [ordinary_tokens(grown("current", doublings, smooth)) for smooth in (False, True)] for doublings in (12, 0)
    )
    assert smoothed > 22.5
    assert smoothed - plain > 15
    assert abs(same - ordinary) < 0.5


@pytest.mark.parametrize("fuse", [False, True])
def test_llama_smoothed_reads_the_smoothed_product(fuse: bool):
    """Fused or not, the cast sees x / s: a product 2^16 times as large has 2^8 times the amax, and the same result."""
    model, plain, ids = llama(fuse), llama(fuse), tiny.tokens()
    fe.smooth(model, "model.layers.0.mlp")
    amaxes = []
    for factor in (1.0, 2.0**16):
        logits = []
        for each in (model, plain):
            with torch.no_grad():
                each.model.layers[0].mlp.up_proj.weight *= factor
                each.model.layers[0].mlp.down_proj.weight /= factor
            logits.append(each(ids).logits)
            amaxes.append(fe.scaling_state(each)["model.layers.0.mlp.down_proj.input"].amax)
        assert sqnr(*logits[::-1]) > 20, "both are the model with FP8's error"
    assert [amaxes[2] / amaxes[0], amaxes[3] / amaxes[1]] == pytest.approx([2.0**8, 2.0**16], rel=1e-6)


@pytest.mark.parametrize("make", [mlp, block, lambda: mlp(recompute=True, store="fp8")], ids=["mlp", "block", "memory"])
def test_our_modules_smoothed_compute_what_they_did(make):
    """y and the gradients are as near to FP32's as the plain module's; 3 dB, for some gradients are 32 numbers.

    Of the gradient of k_proj's bias, which is 0 but for errors, nothing is near.
    """
    model, x = make(), given()
    exact, plain = copy.deepcopy(model), copy.deepcopy(model)
    for layer in exact.modules():
        if isinstance(layer, fe.Linear):
            layer.numerics.adopt(fe.high_precision(fe.FP32))
    fe.smooth(model)
    wanted, before, found = (results(each, x) for each in (exact, plain, model))
    state = state_of(model)
    down = next(i for i, (name, _) in enumerate(state.layers) if name.endswith(("down", "down_proj")))
    assert state.counts_CS[0, 4 * down].item() == 1, "the layer ran in FP8"
    assert not torch.equal(before[0], found[0])
    pairs = [(sqnr(want, one), sqnr(want, other)) for want, one, other in zip(wanted, before, found, strict=True)]
    assert [pair for pair in pairs if pair[0] > 10 and pair[1] < pair[0] - 3] == []
    assert sum(pair[0] > 10 for pair in pairs) >= len(pairs) - 1


@pytest.mark.parametrize("fuse", [False, True])
def test_a_copy_is_set_as_the_model_was_and_switched_off_by_itself(fuse: bool):
    model, ids = llama(fuse), tiny.tokens()
    fe.smooth(model)
    other = copy.deepcopy(model)
    assert torch.equal(other(ids).logits, model(ids).logits)
    assert list(model.state_dict()) == list(llama(fuse).state_dict()) == list(other.state_dict())
    fe.smooth(other, on=False)
    assert torch.equal(other(ids).logits, llama(fuse)(ids).logits)
    assert fe.inspect(model).layers[6]["outliers"] == "smoothed", "the original keeps its own"


def test_the_report_says_what_is_set():
    model = llama(True)
    fe.smooth(model, "model.layers.1.*")
    model(tiny.tokens())
    report = fe.inspect(model)
    assert smoothed(model) == ["model.layers.1.mlp.down_proj"]
    (up,) = [row for row in report.layers if row["name"] == "model.layers.1.mlp.up_proj"]
    assert up["fused"] == "fused: reads what post_attention_layernorm wrote"
    assert "smoothed" in report.table()


@pytest.mark.parametrize("fuse", [False, True])
def test_revert_takes_it_away(fuse: bool):
    model, ids = tiny.llama().eval(), tiny.tokens()
    wanted, attributes = model(ids).logits, [sorted(vars(module)) for module in model.modules()]
    converted(model, "current", fuse=fuse)
    fe.smooth(model)
    assert not torch.allclose(model(ids).logits, wanted)
    fe.revert(model)
    assert torch.equal(model(ids).logits, wanted)
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    converted(model, "current", fuse=fuse)
    assert not any(row["outliers"] for row in fe.inspect(model).layers), "converted anew, nothing is set"


def net(recipe: Any = "current") -> Any:
    torch.manual_seed(0)
    return converted(Net(), recipe)


def smoothed(model: nn.Module) -> list[str]:
    return [row["name"] for row in fe.inspect(model).layers if row["outliers"]]


@pytest.mark.parametrize(
    ("make", "names", "found"),
    [
        (net, None, ["blocks.0.down", "blocks.1.down"]),
        (net, "blocks.1", ["blocks.1.down"]),
        (net, ["*.0.down", "blocks.1.down"], ["blocks.0.down", "blocks.1.down"]),
        (net, "*", ["blocks.0.down", "blocks.1.down"]),
        (lambda: fe.LayerNormMLP(32, 64, "geglu", recipe="current"), None, ["down"]),
        (lambda: converted(tiny.llama()), "*", [f"model.layers.{i}.mlp.down_proj" for i in range(2)]),
    ],
)
def test_what_names_find(make, names, found: list[str]):
    model = make()
    fe.smooth(model, names)
    assert smoothed(model) == found


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Gated, ["0.w2"]),
        (lambda: Gated(lambda gate, up: F.gelu(gate) * up), ["0.w2"]),
        (lambda: Gated(lambda gate, up: F.tanh(gate) * up), []),
        (lambda: Gated(lambda gate, up: gate * up), []),
        (TimmSwiGlu, ["0.fc2"]),
        (Packed, ["0.last"]),
    ],
)
def test_gated_mlps_are_found_by_what_they_compute(make, found: list[str]):
    assert [name for name, _ in gated(converted(nn.Sequential(make())))] == found


def test_a_layer_of_no_mlp_may_be_named():
    model = converted(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    fe.smooth(model, "1")
    assert smoothed(model) == ["1"]
    ids, found, plain = tiny.tokens(), [], FAMILIES["llama"].build()
    with torch.no_grad():
        plain.model.layers[0].input_layernorm.weight[5] *= 2.0**8  # without outliers nothing is multiplied
    for fuse in (False, True):
        model = converted(copy.deepcopy(plain), fuse=fuse)
        before = model(ids).logits
        fe.smooth(model, "*.q_proj")
        found.append(model(ids).logits)
        assert not torch.equal(found[-1], before)
    # The order of FP32 sums may move a code in a few by 2^-3 of itself: a fiftieth of E4M3's 28 dB of noise, at most.
    assert sqnr(*found) > 40


@pytest.mark.parametrize(
    ("make", "names", "error", "words"),
    [
        (lambda: nn.Linear(16, 16), None, ConversionError, "call fe.convert first"),
        (lambda: converted(tiny.gpt2()), None, ConversionError, "no gated MLP is found"),
        (net, "blocks.7.down", UnknownName, "did you mean 'blocks."),
        (lambda: fe.LayerNormMLP(16, 32, "gelu", recipe="current"), "down", ConversionError, "a Linear that is none"),
        (lambda: fe.LayerNormMLP(16, 32, "swiglu", recipe="current"), "gate_up", ConversionError, "gate_up: "),
        (lambda: converted(tiny.mixtral()), None, ConversionError, "the weights of several experts"),
        (lambda: fe.GroupedLinear(2, 16, 16, recipe="current"), "*", ConversionError, "experts, and cannot have fe."),
        (net, ["blocks.0.down", "nowhere"], UnknownName, "nowhere"),
        (net, 3, ConversionError, "names are one glob or several, not int"),
    ],
)
def test_refused_by_name(make, names, error: type[Exception], words: str):
    model = make()
    with pytest.raises(error, match=re.escape(words)):
        fe.smooth(model, names)
    if not isinstance(model, fe.LayerNormMLP):
        assert smoothed(model) == []


def test_a_layer_that_is_set_is_not_divided_and_a_divided_one_not_set():
    model = net()
    style = fe.distributed.Rowwise()
    assert style.problem(model.blocks[0].down, 2) is None
    fe.smooth(model, "blocks.0.down")
    assert "it has fe.smooth, and cannot have a division" in str(style.problem(model.blocks[0].down, 2))
    model.blocks[1].down.numerics.switch(SimpleNamespace(names=(RANKS,)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConversionError, match=r"blocks\.1\.down: it has a division over ranks, and cannot have fe\.sm"):
        fe.smooth(model)
    assert [name for name, layer in gated(model) if layer.numerics.smooth] == ["blocks.0.down"]


def test_a_layer_that_has_a_feature_refuses_another_one_that_the_table_does_not_know():
    numerics: Any = net().blocks[0].down.numerics
    assert not_as_codes(numerics) == ""
    for _ in range(2):
        numerics.switch(Smooth())
    # fully_shard gathers it in high precision
    assert not_as_codes(numerics) == "fe.smooth multiplies the weight before its cast"
    for unknown, why in {
        "a new feature": "cannot have a new feature beside it: one feature runs round a layer's matmuls; switch off",
        RANKS: "cannot have a division over ranks beside it: each rank would choose scales of its own; leave the layer",
    }.items():
        with pytest.raises(fe.errors.ConversionError, match=rf"blocks\.0\.down: it has fe\.smooth, and {why}"):
            numerics.switch(SimpleNamespace(names=(unknown,)))
        assert numerics.smooth
    numerics.switch(None)
    numerics.switch(SimpleNamespace(names=("a new feature",)))
    assert numerics.around == ("a new feature",)


def test_an_alarm_proposes_the_remedy():
    """A channel of the product, ordinary at first, grows 2^13 times: only its own alarm names a remedy."""
    torch.manual_seed(0)
    model = converted(nn.Sequential(MLP()), fe.auto(interval=1))
    heard = []
    fe.scaling_state(model).on_alarm(heard.append)
    for step in range(14):
        with torch.no_grad():
            model[0].up.weight[CHANNEL] *= 2.0**-6 if step == 0 else 2.0
            model[0].up.bias[CHANNEL] = 0.0
        model(batch(step)).tanh().square().mean().backward()
    remedy = "fe.smooth(model, '0.down')"
    assert len({alarm.slot for alarm in heard}) > 1
    assert {(alarm.slot, alarm.remedy) for alarm in heard if alarm.remedy} == {("0.down.input", remedy)}
    assert [alarm["remedy"] for alarm in fe.inspect(model).alarms] == [alarm.remedy for alarm in heard]
    assert [alarm for alarm in heard if str(alarm).endswith(f"; remedy: {remedy}")]
    remedies = controllers_of(model)[0].history.remedies
    fe.smooth(model)
    assert remedies == {}
    fe.smooth(model, on=False)
    assert remedies == {"0.down.input": remedy}
