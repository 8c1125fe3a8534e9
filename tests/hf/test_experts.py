"""Experts of transformers under fe.convert: two grouped matmuls in FP8, everything about them else as it was.

Against transformers' own loop in float64.  Two matmuls follow each other, so that y has 28 - 10 log10(2) dB, dx and dw
10^-2.8 + 10^-2.5 of noise from each (tests/hf/test_families.py), and 3 dB are left for gates and chance.
"""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import transformers
from hf_families import FAMILIES
from support import FP8_RECIPES, converted, same, sqnr, tables
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

import fp8engine as fe
from fp8engine.errors import ParallelError, StrictError
from fp8engine.nn.experts import Float8Experts

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
FORWARD, BACKWARD = 2 * 10**-2.8, 2 * (10**-2.8 + 10**-2.5)
SIZE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 4}
KINDS: dict[str, tuple[Any, Any]] = {  # gated; interleaved, stored [E, K, N], with biases; no gate; a norm after
    "mixtral": (MixtralExperts, transformers.MixtralConfig(**SIZE)),
    "gpt_oss": (GptOssExperts, transformers.GptOssConfig(**SIZE)),
    "nemotron_h": (
        NemotronHExperts,
        transformers.NemotronHConfig(
            hidden_size=32, moe_intermediate_size=48, n_routed_experts=4, mlp_hidden_act="relu2", moe_latent_size=None
        ),
    ),
    "muse_spark": (
        MuseSparkExperts,
        transformers.MuseSparkTextConfig(
            hidden_size=32, num_attention_heads=2, moe_hidden_size=32, moe_intermediate_size=48, num_local_experts=4
        ),
    ),
}
ROUTED = torch.tensor([[0, 2]] * 40 + [[2, 0]] * 40 + [[0, 3]])  # expert 1 has no row, expert 3 one


class Holder(nn.Module):
    """A model of nothing but experts, in a block that chooses two of them."""

    top_k = 2

    def __init__(self, kind: str):
        super().__init__()
        made, config = KINDS[kind]
        config._experts_implementation = "eager"
        self.experts: Any = made(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=parameter.shape[1 if self.experts.is_transposed else -1] ** -0.5)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.experts(x, ROUTED, weights)


def results(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """y and every gradient of one step on the same numbers, in `dtype`."""
    torch.manual_seed(5)
    x, weights = torch.randn(len(ROUTED), 32), torch.rand(len(ROUTED), 2)
    x, weights = x.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()
    y = model(x, weights)
    y.backward(torch.randn(y.shape).to(dtype))
    found = {"y": y.detach(), "dx": x.grad, "dweights": weights.grad}
    return found | {name: p.grad for name, p in model.named_parameters()}  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_against_float64(kind: str, recipe: str):
    plain = Holder(kind)
    model = converted(copy.deepcopy(plain), recipe)
    assert isinstance(model.experts, KINDS[kind][0])
    want, found = results(plain.double(), torch.float64), results(model, torch.float32)
    assert set(found) == set(want)
    for name in want:
        noise = FORWARD if name in ("y", "dweights") else BACKWARD
        assert sqnr(want[name], found[name]) > -10 * math.log10(noise) - 3, name
        if "down_proj_bias" not in name:  # its gradient is a sum of dy before any cast
            assert sqnr(want[name], found[name]) < 60, f"{name}: FP8 it is"
    for name in (name for name in want if name.startswith("experts.") and "norm" not in name):
        assert found[name][2].any(), name
        assert not found[name][1].any(), f"{name}: no row, no gradient"


@pytest.mark.parametrize("kind", KINDS)
def test_slots_and_counts(kind: str):
    model = converted(Holder(kind), "delayed")
    results(model, torch.float32)
    first = "gate_up_proj" if model.experts.has_gate else "up_proj"
    rows = {row["name"]: row for row in fe.inspect(model).layers}
    assert set(rows) == {f"experts.{first}", "experts.down_proj"}
    state = fe.scaling_state(model)
    weight = dict(model.named_parameters())
    for name, row in rows.items():
        n, k = row["shape"][1:]
        stored = [4, k, n] if model.experts.is_transposed else [4, n, k]
        assert list(weight[name].shape) == stored
        m, class_of = ROUTED.numel(), f"Float8{KINDS[kind][0].__name__}"
        assert (row["kind"], row["experts"], row["rows"]) == (class_of, [2, 4], m)
        for role, elements in (("input", m * k), ("weight", 4 * n * k), ("grad_output", m * n)):
            slot = state[f"{name}.{role}"]
            assert (int(slot.calls), int(slot.elements)) == (1, elements), (name, role)
        assert state[f"{name}.weight"].amax == weight[name].abs().max()
    saved = fe.scaling_state_dict(model)
    other = converted(Holder(kind), "delayed")
    fe.load_scaling_state_dict(other, saved)
    assert same(tables(other), tables(model))


def test_one_of_the_two_may_stay_in_its_own_precision():
    torch.manual_seed(1)
    plain = Holder("mixtral")
    want = results(copy.deepcopy(plain).double(), torch.float64)["y"]
    one, two = converted(copy.deepcopy(plain), overrides={"*.down_proj": "fp32"}), converted(plain)
    reasons = {row["name"]: (row["recipe"], row["reason"]) for row in fe.inspect(one).layers}
    assert reasons["experts.down_proj"][0] == "none"
    assert reasons["experts.down_proj"][1].startswith("overrides: fp32, which it computes in already; 2 of 4 a token")
    assert reasons["experts.gate_up_proj"][0] == "current"
    less = sqnr(want, results(one, torch.float32)["y"]) - sqnr(want, results(two, torch.float32)["y"])
    assert 1 < less < 6, "one source of noise of two, 3 dB"
    assert set(fe.scaling_state_dict(one)["slots"]) == {
        f"experts.gate_up_proj.{role}" for role in ("input", "weight", "grad_output")
    }


def test_sixteen_bits_and_autocast():
    torch.manual_seed(1)
    plain = Holder("gpt_oss")
    want = results(copy.deepcopy(plain).double(), torch.float64)
    half = results(converted(copy.deepcopy(plain).bfloat16(), "rowwise"), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        auto = results(converted(plain, "rowwise"), torch.float32)
    assert {x.dtype for x in half.values()} == {torch.bfloat16}
    assert {x.dtype for x in auto.values()} == {torch.float32}
    for name, x in want.items():
        for found in (half, auto):  # beside FP8's noise that of BF16, 2^-9 of each value, is 20 dB lower
            assert sqnr(x, found[name].float()) > -10 * math.log10(BACKWARD) - 3, name


class Experts(nn.Module):
    """Somebody's, with the parameters of Mixtral's."""

    def __init__(self, held: Any):
        super().__init__()
        self.gate_up_proj, self.down_proj = held.gate_up_proj, held.down_proj


class Other(MixtralExperts):
    """With a forward of its own."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


AS_WRITTEN = "is not written as transformers' use_experts_implementation wants it"
SPOILT: dict[str, tuple[Any, str]] = {
    "another class": (lambda moe: setattr(moe, "experts", Experts(moe.experts)), AS_WRITTEN),
    "another forward": (lambda moe: setattr(moe.experts, "__class__", Other), AS_WRITTEN),
    "another parameter": (
        lambda moe: moe.experts.register_parameter("extra", nn.Parameter(torch.ones(4))),
        "and extra is not as use_experts_implementation has it",
    ),
    "over processes": (lambda moe: setattr(moe.experts, "_is_expert_parallel", True), "(expert parallelism)"),
    "another dtype": (lambda moe: moe.experts.double(), "of torch.float64; FP8 casts take float32"),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_is_not_understood_is_left_alone_with_the_reason(spoilt: str):
    model: Any = nn.ModuleDict({"moe": Holder("mixtral"), "linear": nn.Linear(32, 32)})
    spoil, why = SPOILT[spoilt]
    spoil(model.moe)
    with pytest.raises(StrictError, match=r"2 layers cannot be converted: moe\.experts.gate_up_proj"):
        fe.convert(model, strict=True)
    kind = type(model.moe.experts)
    converted(model)
    assert type(model.moe.experts) is kind
    row = {row["name"]: row for row in fe.inspect(model).layers}["moe.experts.down_proj"]
    assert (row["recipe"], row["backend"]) == ("none", "torch")
    assert why in row["reason"]
    assert "2 of 4 a token, " in row["reason"]
    # A token passes two experts of 96 x 32 and 32 x 48, and one layer of 32 x 32.
    assert row["flops_share"] == pytest.approx(2 * 32 * 48 / (2 * (96 + 48) * 32 + 32 * 32))


def test_expert_parallelism_after_convert_is_refused():
    model = converted(Holder("mixtral"))
    model.experts._is_expert_parallel = True
    with pytest.raises(ParallelError, match=r"experts.gate_up_proj: expert parallelism came after fe.convert"):
        results(model, torch.float32)


def test_copies_pickles_and_hooks():
    model, seen = converted(Holder("mixtral"), "delayed"), []
    loaded = pickle.loads(pickle.dumps(model))
    model.experts.register_forward_hook(lambda m, args, y: seen.append(len(y)))
    twin = copy.deepcopy(model)
    model.experts._forward_hooks.clear()
    want = results(model, torch.float32)
    for other in (twin, loaded):
        assert type(other.experts) is type(model.experts)
        assert isinstance(other.experts, Float8Experts)
        states = {n.state for n in other.experts.parts.values()}
        assert states == {other.experts.numerics.state} != {model.experts.numerics.state}
        assert same(list(results(other, torch.float32).values()), list(want.values()))
    assert seen == [len(ROUTED)]
    assert "gate_up_proj: recipe=delayed, down_proj: recipe=delayed" in repr(model)


@pytest.mark.parametrize("order", ["convert first", "adapters first"])
def test_lora_on_the_parameters_of_experts(order: str):
    """peft adds its low-rank matrices to the 3-D parameter before every forward: the sum is what is cast."""
    peft = pytest.importorskip("peft")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=targets, init_lora_weights=False)
    runs = []
    for first in (order, "plain"):
        torch.manual_seed(3)
        model = FAMILIES["mixtral"].build_smooth()
        if first == "convert first":
            model = converted(model)
        torch.manual_seed(4)
        model = peft.get_peft_model(model, config)
        if first == "adapters first":
            model = converted(model)
        torch.manual_seed(5)
        model(**FAMILIES["mixtral"].batch(rows=16)).loss.backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert all(p.grad is not None and p.grad.any() for p in trained)
        runs.append((torch.cat([p.grad.flatten() for p in trained]), model))
    assert sqnr(runs[1][0], runs[0][0]) > -10 * math.log10(8 * (10**-2.8 + 10**-2.5)) - 3, (
        "eight layers one after another"
    )
    rows = [row for row in fe.inspect(runs[0][1]).layers if row["experts"]]
    assert len(rows) == 4
    assert all(row["recipe"] == "current" and row["ran"] for row in rows)
