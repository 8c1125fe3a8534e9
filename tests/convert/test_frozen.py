"""fe.convert(frozen="fp8"): frozen weights stored as codes; adapters train on them; the way back and to disk."""

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import tiny_models as tiny
import torch
import transformers
from hf_families import FAMILIES
from support import converted, same, sqnr
from torch import nn

import fp8engine as fe
from fp8engine.errors import ConversionError, FrozenWarning, GradientError, StateError, StrictError, UnknownName
from fp8engine.nn.serving import Served

pytestmark = pytest.mark.filterwarnings(
    "ignore::fp8engine.errors.EmulationWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]


def frozen_llama(recipe: Any = "rowwise", **options) -> Any:
    torch.manual_seed(3)
    return fe.convert(tiny.llama().requires_grad_(False), recipe, frozen="fp8", **options)


def with_lora(model: nn.Module, dora: bool = False) -> Any:
    torch.manual_seed(7)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, use_dora=dora, init_lora_weights=dora)
    return peft.get_peft_model(model, config)  # pyright: ignore


def test_codes_stand_where_weights_were():
    plain = tiny.llama()
    model: Any = fe.convert(copy.deepcopy(plain).requires_grad_(False), "rowwise", frozen="fp8")
    linear: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, Served)}
    assert len(linear) == 7 * len(model.model.layers)
    assert {row["recipe"] for row in fe.inspect(model).layers if row["kind"] == "ServedLinear"} == {"rowwise"}
    codes = {}
    for name, layer in linear.items():
        weight: Any = plain.get_submodule(name).weight
        want = codes[name] = fe.quantize(weight.detach(), fe.rowwise().weight)
        assert same([layer.weight.view(torch.uint8), layer.scale], [want.data.view(torch.uint8), want.scale]), name
        held = sum(p.nbytes for p in layer.parameters())  # one byte a weight and four a row
        assert (layer.numerics.name, held) == (name, weight.numel() + 4 * len(weight))
    reverted = fe.revert(model)
    for name, q in codes.items():
        assert type(reverted.get_submodule(name)) is nn.Linear
        assert torch.equal(reverted.get_submodule(name).weight, q.data.float() * q.scale), "what the codes stand for"


@pytest.mark.parametrize("recipe", ["current", "rowwise", "blockwise", "delayed", "rowwise_gw_hp", "auto"])
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_adapters_get_the_gradients_of_the_codes(recipe: str, dora: bool):
    model = with_lora(frozen_llama(recipe), dora).eval()
    ids = tiny.tokens(4)
    tiny.loss_of(model, ids).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    fe.revert(model)
    tiny.loss_of(model, ids).backward()
    for name, p in model.named_parameters():
        if p.requires_grad and p.grad.norm() > 0:
            # Two operands of 3 mantissa bits: 28 dB each matmul (E4M3 31.6 dB an operand), 25 dB with E5M2 gradients;
            # half a dozen matmuls one after another lose up to 8 dB of it.
            assert sqnr(p.grad.numpy(), found[name].numpy()) > 15, name


def test_adapters_first_is_the_same_bit_for_bit():
    ids = tiny.tokens(4)
    torch.manual_seed(3)
    first = fe.convert(with_lora(tiny.llama()), "rowwise", frozen="fp8").eval()
    second = with_lora(frozen_llama()).eval()
    losses = [tiny.loss_of(model, ids) for model in (first, second)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    one, other = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (first, second))
    assert one.keys() == other.keys()
    assert same(list(one.values()), list(other.values()))


def test_merging_takes_the_reverted_model():
    model = with_lora(frozen_llama()).eval()
    ids = tiny.tokens(4)
    with pytest.raises(RuntimeError, match="Float8"):  # torch's own: before anything was added
        model.merge_and_unload()
    adapted = model.base_model.model.model.layers[0].mlp.up_proj
    want = adapted.base_layer.dequantize() + adapted.get_delta_weight("default")
    fe.revert(model)
    merged = model.merge_and_unload()
    up = merged.model.layers[0].mlp.up_proj
    assert type(up) is nn.Linear
    assert torch.equal(up.weight, want)
    assert not any(isinstance(module, Served) for module in merged.modules())
    assert merged(ids).logits.isfinite().all()


def test_only_frozen_weights_are_stored():
    model: Any = tiny.llama()
    model.model.layers[0].requires_grad_(False)
    fe.convert(model, "auto", frozen="fp8")
    found = [[m for m in block.modules() if isinstance(m, fe.Linear | Served)] for block in model.model.layers]
    kinds = [{(type(m).__name__, m.numerics.recipe.name) for m in layers} for layers in found]
    assert kinds == [{("ServedLinear", "rowwise")}, {("Linear", "auto")}]
    tiny.loss_of(model, tiny.tokens(4)).backward()
    assert all(p.grad is not None for p in model.model.layers[1].parameters())
    assert model.model.embed_tokens.weight.grad.norm() > 0, "gradients pass the frozen block"


def test_reverting_leaves_another_librarys_quantizer():
    model: Any = nn.Sequential(nn.Linear(32, 32))
    theirs = model.hf_quantizer = SimpleNamespace(
        remove_quantization_config=lambda model: pytest.fail("it is not ours")
    )
    fe.revert(fe.convert(model, "current"))
    assert model.hf_quantizer is theirs


def test_gpt2s_conv1d():
    model = converted(tiny.gpt2().requires_grad_(False), "rowwise", frozen="fp8")
    assert any(type(m).__name__ == "ServedConv1D" for m in model.modules())
    plain = copy.deepcopy(model)
    fe.revert(plain)
    x = torch.randn(3, 5, model.config.n_embd, requires_grad=True)
    layer, reverted = (each.transformer.h[0].mlp.c_fc for each in (model, plain))
    assert type(reverted) is transformers.pytorch_utils.Conv1D
    assert reverted.weight.shape == (model.config.n_embd, 4 * model.config.n_embd)
    grads = [torch.autograd.grad(each(x).square().sum(), x)[0] for each in (layer, reverted)]
    assert sqnr(grads[1].numpy(), grads[0].numpy()) > 20  # three casts of 31.6 dB, one behind the other


def test_what_is_refused():
    with pytest.raises(UnknownName, match="unknown frozen 'int8'"):
        fe.convert(tiny.llama(), "current", frozen="int8")
    model: Any = tiny.llama()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ConversionError, match=r"every weight that it converts takes gradients.*get_peft_model first"):
        fe.convert(model, "current", frozen="fp8")
    model.requires_grad_(False)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(StateError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        fe.convert(model, "current", frozen="fp8")
    assert [type(m) for m in model.modules()] == kinds, "an error changed the model"
    stored = frozen_llama()
    with pytest.raises(ConversionError, match=r"stores FP8 codes instead of a weight: fe\.revert"):
        fe.convert(stored, "current")
    stored.model.layers[0].mlp.up_proj.weight.requires_grad_()
    with pytest.raises(GradientError, match="which no optimizer can update"):
        stored(tiny.tokens(2))


def test_t5_casts_to_the_dtype_of_a_weight_which_stays_under_an_adapter_too():
    """transformers: hidden_states.to(self.wo.weight.dtype), which of codes would be FP8 without a scale."""
    torch.manual_seed(0)
    model: Any = FAMILIES["t5"].build().requires_grad_(False)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q", "wo"]))
    with pytest.warns(FrozenWarning, match=r"4 frozen layers keep .*wo.*casts to the dtype of its weight"):
        fe.convert(model, "rowwise", frozen="fp8")
    ids = tiny.tokens(2)
    model(input_ids=ids, labels=ids).loss.backward()
    served = 2 * (5 + 9)  # two blocks each of q, k, v, o and wi, in the decoder with another four across
    assert sum(isinstance(module, Served) for module in model.modules()) == served
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_what_cannot_be_stored_is_said():
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in "abc"}).requires_grad_(False)
    model["b"].weight = model["a"].weight
    with pytest.warns(FrozenWarning, match=r"2 frozen layers keep .* 'a' the first: its weight is shared"):
        fe.convert(model, "current", frozen="fp8")
    assert [type(m).__name__ for m in model.values()] == ["Linear", "Linear", "ServedLinear"]
    assert model["a"].weight is model["b"].weight
    again = nn.ModuleDict({"a": nn.Linear(32, 32)}).requires_grad_(False)
    again["b"] = again["a"]  # one module under two names holds its weight alone
    with warnings.catch_warnings():
        warnings.simplefilter("error", FrozenWarning)
        fe.convert(again, "current", frozen="fp8")
    model = fe.revert(model)
    with pytest.raises(StrictError, match=r"frozen='fp8'|emulated"):
        fe.convert(model, "current", frozen="fp8", strict=True)


@pytest.mark.parametrize("adapters", [False, True])
def test_save_pretrained_writes_what_load_reads(adapters: bool, tmp_path):
    overrides, ids = {"*.down_proj*": "blockwise", "*.o_proj": "fp32"}, tiny.tokens(2)
    owner = model = frozen_llama(overrides=overrides).eval()
    if adapters:
        owner = fe.convert(with_lora(tiny.llama().requires_grad_(False)), "rowwise", frozen="fp8", overrides=overrides)
        model = owner.unload().eval()
    model.save_pretrained(tmp_path / "codes")
    loaded = fe.hf.load(tmp_path / "codes")
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert isinstance(loaded.model.layers[0].mlp.down_proj, Served)
    assert not isinstance(loaded.model.layers[0].self_attn.o_proj, Served)
    fe.revert(owner)
    for reverted in (model, fe.revert(loaded), fe.hf.load(tmp_path / "codes").dequantize()):
        assert not hasattr(reverted.config, "quantization_config")
        assert type(reverted.model.layers[0].mlp.up_proj) is nn.Linear
        fe.hf.export(reverted, tmp_path / f"again{id(reverted)}", "rowwise")


def test_dequantize_rounds_nothing_but_the_codes(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "plain")  # pyright: ignore
    base: Any = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    fe.hf.export(base, tmp_path / "codes", "rowwise")
    plain: Any = fe.revert(fe.hf.load(tmp_path / "codes"))
    theirs = fe.hf.load(tmp_path / "codes").dequantize()
    assert theirs.model.rotary_emb.inv_freq.dtype == torch.float32
    ids = tiny.tokens(2)
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, plain(ids).logits)
    wide = fe.hf.load(tmp_path / "codes").dequantize(torch.float32)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}


def test_the_trainer_takes_a_loaded_base(tmp_path):
    fe.hf.export(tiny.llama().eval(), tmp_path / "fp8", "rowwise")
    model = with_lora(fe.hf.load(tmp_path / "fp8"))
    rows = [{"input_ids": ids, "labels": ids} for ids in tiny.tokens(8)]
    options = transformers.TrainingArguments(
        str(tmp_path / "out"), use_cpu=True, report_to=[], max_steps=3, per_device_train_batch_size=2, save_steps=2,
        disable_tqdm=True, learning_rate=1e-2, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, options, train_dataset=rows)  # pyright: ignore
    trainer.train()
    again = peft.PeftModel.from_pretrained(fe.hf.load(tmp_path / "fp8"), tmp_path / "out" / "checkpoint-3")
    ids = tiny.tokens(2)
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)


def test_adapters_train_under_ddp_over_gloo(group):
    """Gloo broadcasts no FP8: docs/serving.md names init_sync=False, which leaves every rank its own weights."""

    def gradients(wrap) -> list[torch.Tensor]:
        model = with_lora(frozen_llama())
        wrap(model)(input_ids=torch.arange(8)[None]).logits.square().mean().backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    ddp = nn.parallel.DistributedDataParallel
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        gradients(ddp)
    assert all(map(torch.equal, gradients(lambda model: model), gradients(lambda model: ddp(model, init_sync=False))))
