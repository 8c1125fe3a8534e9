"""peft's adapters on converted layers: both orders train alike, and the merged weight is cast again."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from support import converted, same
from tiny_models import llama, tokens
from torch import nn

import fp8engine as fe

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:All adapters are already merged",
    "ignore:Unmerge result can be inaccurate",
)
BOTH: Any = {"target_modules": ["first", "second"]}
METHODS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(init_lora_weights=False, **BOTH),
    "dora": lambda: peft.LoraConfig(init_lora_weights=False, use_dora=True, **BOTH),
    "ia3": lambda: peft.IA3Config(init_ia3_weights=False, feedforward_modules=["second"], **BOTH),
    "oft": lambda: peft.OFTConfig(r=4, oft_block_size=0, init_weights=False, **BOTH),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, init_weights=False, **BOTH),
    "vera": lambda: peft.VeraConfig(init_weights=False, target_modules=["first"]),
    "loha": lambda: peft.LoHaConfig(init_weights=False, **BOTH),
    "lokr": lambda: peft.LoKrConfig(init_weights=False, **BOTH),
    "glora": lambda: peft.GloraConfig(init_weights=False, **BOTH),
}
ORDERS = ["convert first", "adapters first"]
CASES = [(method, order) for method in METHODS for order in ORDERS if (method, order) != ("glora", "convert first")]
# A product of two E4M3 operands has a relative error of 10^(-28.5 / 20) = 0.038 (DESIGN 9); two layers in a row make
# 0.053, and 32 columns are few to average over: twice that.
NOISE = 0.11
X = torch.linspace(-1, 1, 8 * 32).view(8, 32)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """BOFT compiles a CUDA extension when it is made, and does without where it cannot."""
    monkeypatch.setattr("peft.tuners.boft.layer.get_fbd_cuda", lambda: None)


def base() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(OrderedDict(first=nn.Linear(32, 64), relu=nn.ReLU(), second=nn.Linear(64, 32)))


def adapted(method: str, order: str = "") -> Any:
    """The MLP with adapters that change what it computes; order "": not converted."""
    model = converted(base()) if order == "convert first" else base()
    torch.manual_seed(2)
    model = peft.get_peft_model(model, METHODS[method]())
    return (converted(model) if order == "adapters first" else model).eval()


def weights(model: Any) -> list[torch.Tensor]:
    """Copies of the weights and biases that the layers under the adapters have now."""
    parts = (model.base_model.model.first, model.base_model.model.second)
    layers = [getattr(part, "base_layer", part) for part in parts]
    return [p.detach().clone() for layer in layers for p in (layer.weight, layer.bias)]


def away(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found - want).norm() / want.norm())


@pytest.mark.parametrize(("method", "order"), CASES)
def test_merging_computes_what_the_merged_weight_converted_afresh_computes(method: str, order: str):
    model, plain = adapted(method, order), adapted(method)
    before = weights(model)
    with torch.no_grad():
        apart = model(X)
        assert away(apart, plain(X)) < NOISE
        with model.disable_adapter():
            assert torch.equal(model(X), converted(base())(X)), "the base alone"
        for each in (model, plain):
            each.merge_adapter()
        assert same(weights(model), weights(plain)), "peft's arithmetic is not touched"
        merged = model(X)
        unloaded = copy.deepcopy(plain).merge_and_unload()
        assert torch.equal(merged, converted(copy.deepcopy(unloaded))(X)), "cast again, once"
        # Apart, base and adapter were rounded by themselves; merged, their sum is: two noises of this size.
        assert away(merged, apart) < 2 * NOISE
        assert away(merged, unloaded(X)) < NOISE
        for each in (model, plain):
            each.unmerge_adapter()
        assert same(weights(model), weights(plain))
        # peft adds and takes away in FP32: a weight may come back an ulp off, and then round to the neighbouring code,
        # 2^-3 of it; fewer than one weight in 1,000 lies that near to a boundary: 2^-3 * sqrt(1e-3) = 0.004.
        assert away(model(X), apart) <= (0.0 if same(weights(model), before) else 0.004)
        want = converted(plain.merge_and_unload())(X)
        assert torch.equal(model.merge_and_unload()(X), want), "merged a second time"


def test_after_a_merge_on_a_card_the_model_is_told(monkeypatch: pytest.MonkeyPatch):
    """The host reads nothing of a weight there, and LoRA's `weight.data += delta` moves neither counter nor address."""
    monkeypatch.setattr("fp8engine.autograd.weight.fingerprint", lambda weight, whole: [])
    model = adapted("lora", "convert first")
    with torch.no_grad():
        model(X)
        model.merge_adapter()
        fe.weights_changed(model)
        merged = model(X)
        assert torch.equal(merged, converted(adapted("lora").merge_and_unload())(X))
        model.unmerge_adapter()
        fe.weights_changed(model)
        assert not torch.equal(model(X), merged)


@pytest.mark.parametrize(("method", "order"), CASES)
def test_adapters_get_the_gradients_of_the_plain_model_within_the_noise(method: str, order: str):
    gradients = []
    for model in (adapted(method, order), adapted(method)):
        model(X).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    # Forward's noise is in y, which is backward's input; a gradient in E5M2 has half the bits: 0.076 a product.
    assert 0 < away(*gradients) < NOISE + 2 * 0.076


def test_glora_refuses_a_converted_layer_by_name():
    with pytest.raises(ValueError, match=r"is not a plain torch\.nn\.Linear"):
        adapted("glora", "convert first")


def test_an_adapter_that_reads_the_weight_and_calls_no_layer_is_warned_of():
    torch.manual_seed(2)
    model: Any = peft.get_peft_model(converted(base()), peft.HRAConfig(init_weights=False, **BOTH))
    with pytest.warns(fe.errors.BypassWarning, match=r"2 converted layer\(s\) did not run in FP8: first, second\. "):
        model(X)
    model.merge_adapter()
    model(X)
    assert fe.inspect(model).totals["never_ran"] == 0


def test_a_whole_layer_that_an_adapter_trains_is_what_the_original_is():
    """modules_to_save puts a copy beside the layer, which is in FP8 where the layer would be; a head stays a head."""
    found, config = [], peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["down_proj", "lm_head"])
    for order in ORDERS:
        torch.manual_seed(1)
        model = converted(llama(), "rowwise") if order == "convert first" else llama()
        torch.manual_seed(2)
        model = peft.get_peft_model(model, config)
        model = model if order == "convert first" else converted(model, "rowwise")
        model(input_ids=tokens(4)).logits.square().sum().backward()
        rows = {row["name"]: row for row in fe.inspect(model).layers if "modules_to_save" in row["name"]}
        recipes = {name.split(".modules_to_save")[0].rpartition(".")[2]: row["recipe"] for name, row in rows.items()}
        assert recipes == {"down_proj": "rowwise", "lm_head": "none"}, order
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    assert same(*found)
