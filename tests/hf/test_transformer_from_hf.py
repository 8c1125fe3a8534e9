"""TransformerLayer.from_hf: every family's block gives its own numbers again, forward and backward, or is refused."""

from typing import Any

import peft
import pytest
import torch
import transformers
from hf_families import FAMILIES, MORE, Family
from support import converted, sqnr
from torch import nn

import fp8engine as fe
from fp8engine.errors import ConversionError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
REFUSED = {
    "t5": "relative positions",
    "t5-v1.1": "relative positions",
    "mixtral": "mixture of experts",
    "qwen2_moe": "mixture of experts",
    "qwen3_moe": "mixture of experts",
    "gpt_oss": "mixture of experts",
    "gemma": "its norms multiply by 1 \\+ weight",
    "gemma2": "it normalises what attention and MLP return",
    "gemma3": "it normalises what attention and MLP return",
    "olmo2": "it normalises what attention and MLP return",
    "olmo3": "it normalises what attention and MLP return",
    "granite": "it multiplies by 0.5 before each residual addition",
    "mpnet": "its attention does not say whether it is causal",
    "deberta-v2": "its attention does not say whether it is causal",
    "modernbert": "its rotary positions depend on the kind of block",
    "dinov2": "nothing in a TransformerLayer corresponds to layer_scale1",
}
EVERY = FAMILIES | MORE
PARTLY = ("whisper", "bart", "smollm3")  # some of their blocks are refused
FITTING = [name for name in EVERY if name not in REFUSED and name not in PARTLY]
FP32 = fe.high_precision(fe.FP32)
# Two computations in FP32 of the same: every rounding is 2^-24 of its result (144 dB), sixteen of them in a row 24 dB.
SAME_DB = 120.0


class Calls:
    """What goes into and comes out of each block in one forward of its model, and the model's padding mask."""

    def __init__(self, family: Family, **options: Any):
        self.model = family.build(attn_implementation="eager", **options)
        self.batch = family.batch()
        blocks = fe.hf.describe(self.model).blocks
        self.blocks = {block.name: self.model.get_submodule(block.name) for block in blocks}
        self.seen: dict[str, tuple[torch.Tensor, tuple]] = {}
        hooks = [
            module.register_forward_pre_hook(lambda m, a, k, n=name: self._note(n, a, k), with_kwargs=True)
            for name, module in self.blocks.items()
        ]
        with torch.no_grad():
            self.model(**self.batch)
        for hook in hooks:
            hook.remove()
        mask = self.batch.get("attention_mask")
        self.padding = None if mask is None else mask.bool()

    def _note(self, name: str, args: tuple, kwargs: dict) -> None:
        first, *rest = args or (kwargs.pop("hidden_states"),)
        without_cache = [None if isinstance(each, transformers.Cache) else each for each in (*rest, *kwargs.values())]
        kwargs = dict(zip(kwargs, without_cache[len(rest) :], strict=True))
        self.seen[name] = first, (without_cache[: len(rest)], kwargs)

    def theirs(self, name: str, x: torch.Tensor) -> torch.Tensor:
        args, kwargs = self.seen[name][1]
        y = self.blocks[name](x, *args, **kwargs)
        return y[0] if isinstance(y, tuple) else y


def both_ways(layer, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def check(calls: Calls, name: str, recipe: Any, bounds=(SAME_DB, SAME_DB)) -> fe.TransformerLayer:
    layer = fe.TransformerLayer.from_hf(calls.blocks[name], recipe)
    x = calls.seen[name][0].detach()
    dy = torch.randn(x.shape)
    wanted = both_ways(lambda leaf: calls.theirs(name, leaf), x, dy)
    found = both_ways(lambda leaf: layer(leaf, calls.padding), x, dy)
    for want, got, bound in zip(wanted, found, bounds, strict=True):
        assert sqnr(want, got) > bound
    return layer


@pytest.mark.parametrize("name", FITTING)
def test_a_block_gives_its_own_numbers_again(name: str):
    calls = Calls(EVERY[name])
    for block in calls.blocks:
        check(calls, block, FP32)


@pytest.mark.parametrize("name", ["whisper", "bart"])
def test_an_encoder_too_and_not_its_decoder(name: str):
    calls = Calls(EVERY[name])
    check(calls, "model.encoder.layers.1", FP32)
    with pytest.raises(ConversionError, match=r"DecoderLayer: it has cross attention; fe\.convert\(model, recipe\)"):
        fe.TransformerLayer.from_hf(calls.blocks["model.decoder.layers.0"], "current")


def test_smollm3s_rotating_blocks_and_not_the_others():
    calls = Calls(MORE["smollm3"])
    check(calls, "model.layers.0", FP32)
    with pytest.raises(ConversionError, match="its q and k are not rotated, though those of other blocks are"):
        fe.TransformerLayer.from_hf(calls.blocks["model.layers.1"], "current")


def with_options(name: str, options: dict) -> Family:
    return Family(**{**vars(FAMILIES[name]), "options": FAMILIES[name].options | options})


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 8, "hidden_act": "gelu_pytorch_tanh"}),
        ("llama", {"rope_parameters": LINEAR}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 3}),
        ("phi3", {"sliding_window": 4}),
        ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
        ("opt", {"enable_bias": False, "activation_function": "gelu"}),
        ("vit", {"qkv_bias": False, "hidden_act": "gelu_fast"}),
        ("roberta", {"is_decoder": True}),
        ("gpt2", {"n_inner": 48, "activation_function": "relu", "layer_norm_epsilon": 1e-2}),
    ],
)
def test_what_a_config_may_choose(name: str, options: dict):
    calls = Calls(with_options(name, options))
    for block in calls.blocks:
        check(calls, block, FP32)


@pytest.mark.parametrize(("name", "recipe"), [("llama", "rowwise"), ("phi3", "current"), ("bert", "current")])
def test_under_a_recipe_within_its_noise(name: str, recipe: str):
    calls = Calls(FAMILIES[name])
    block = next(iter(calls.blocks))
    # As in test_transformer.py: four matmuls in E4M3, and in a gradient four casts of dy at 24 dB beside.
    layer = check(calls, block, recipe, (19.5, 13.5))
    assert all(row["recipe"] == recipe and row["ran"] for row in fe.inspect(layer).layers)
    x = calls.seen[block][0]
    assert sqnr(calls.theirs(block, x), layer(x, calls.padding)) < 60, "FP8 was really used"


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_llamas_state_dict_loads_and_goes_back(name: str):
    block: Any = FAMILIES[name].build().model.layers[0]
    layer = fe.TransformerLayer.from_hf(FAMILIES[name].build().model.layers[1], "current")
    layer.load_state_dict(block.state_dict())
    for key, value in layer.state_dict().items():
        assert torch.equal(value, block.state_dict()[key])
    block.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
def test_a_copy_that_shares_nothing_and_is_as_the_block_was(name: str):
    model = FAMILIES[name].build().bfloat16()
    block: Any = model.get_submodule(fe.hf.describe(model).blocks[0].name)
    block.train()
    next(p for n, p in block.named_parameters() if n in ("input_layernorm.weight", "ln_1.weight")).requires_grad_(False)
    before = torch.random.get_rng_state()
    layer = fe.TransformerLayer.from_hf(block, "delayed", recompute="norm", store="fp8")
    assert torch.equal(before, torch.random.get_rng_state()), "the seed of what comes after is not used up"
    ours = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    assert len(ours) == len(list(layer.parameters())), "nor do they share among themselves"
    assert not ours & {p.untyped_storage().data_ptr() for p in block.parameters()}
    assert all(type(p) is nn.Parameter and p.is_contiguous() for p in layer.parameters())
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert [n for n, p in layer.named_parameters() if not p.requires_grad] == ["input_layernorm.weight"]
    assert layer.training
    assert layer.memory == (True, False, "fp8")
    layer(torch.randn(2, 5, 32).bfloat16()).sum().backward()


HIDDEN = ({"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2}, (0.1, 0.1))
DROPOUT = {
    "gpt2": ({"resid_pdrop": 0.1, "attn_pdrop": 0.2}, (0.1, 0.1)),
    "phi": ({"resid_pdrop": 0.1, "attention_dropout": 0.2}, (0.1, 0.1)),
    "phi3": ({"resid_pdrop": 0.1, "attention_dropout": 0.2}, (0.1, 0.1)),
    "gpt_neox": ({"hidden_dropout": 0.1, "attention_dropout": 0.2}, (0.1, 0.1)),
    "opt": ({"dropout": 0.1, "attention_dropout": 0.2}, (0.1, 0.1)),
    "whisper": ({"dropout": 0.1, "attention_dropout": 0.2}, (0.1, 0.1)),
    "bert": HIDDEN,
    "roberta": HIDDEN,
    "vit": HIDDEN,
    "distilbert": ({"dropout": 0.1, "attention_dropout": 0.2}, (0.0, 0.1)),
    "albert": (HIDDEN[0], (0.1, 0.0)),
    "llama": ({"attention_dropout": 0.2}, (0.0, 0.0)),
    "clip": ({}, (0.0, 0.0)),
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_where_the_block_has_it(name: str):
    """Told by the rates, and by the block itself: with all of it dropped the same is left."""
    options, rates = DROPOUT[name]
    calls = Calls(with_options(name, options))
    block = next(iter(calls.blocks))
    layer = fe.TransformerLayer.from_hf(calls.blocks[block], FP32)
    assert (layer.dropout, layer.self_attn.heads.dropout) == (rates, 0.2 if options else 0.0)
    calls = Calls(with_options(name, {key: 1.0 if rate == 0.1 else 0.0 for key, rate in options.items()}))
    calls.blocks[block].train()
    layer, x = fe.TransformerLayer.from_hf(calls.blocks[block], FP32), calls.seen[block][0]
    assert sqnr(calls.theirs(block, x), layer(x, calls.padding)) > SAME_DB


@pytest.mark.parametrize("name", REFUSED)
def test_families_it_cannot_be_are_refused_with_the_reason(name: str):
    model = EVERY[name].build()
    block = model.get_submodule(fe.hf.describe(model).blocks[0].name)
    with pytest.raises(
        ConversionError, match=rf"{REFUSED[name]}.*; fe\.convert\(model, recipe\) puts its linear layers"
    ):
        fe.TransformerLayer.from_hf(block, "current", model.config)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("llama", {"rope_parameters": YARN}, "its rotary positions are of type 'yarn'"),
        ("llama", {"hidden_act": "mish"}, "its activation is 'mish'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "its scores are multiplied by 0.125, not by 1 / sqrt"),
        ("gpt2", {"add_cross_attention": True}, "corresponds to crossattention.c_attn.weight"),
        ("phi", {"qk_layernorm": True}, "corresponds to self_attn.q_layernorm.weight"),
        ("whisper", {"activation_dropout": 0.1}, "it drops out after the activation"),
    ],
)
def test_what_a_config_may_choose_and_it_has_not(name: str, options: dict, words: str):
    model = FAMILIES[name].build(**options)
    blocks = [model.get_submodule(block.name) for block in fe.hf.describe(model).blocks]
    with pytest.raises(ConversionError, match=words):
        fe.TransformerLayer.from_hf(blocks[0 if name == "whisper" else -1], "current")


def test_other_modules_are_refused_with_the_reason():
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    bloom = transformers.BloomForCausalLM(config)
    with pytest.raises(ConversionError, match="BloomBlock: model_type 'bloom' is in no row"):
        fe.TransformerLayer.from_hf(bloom.transformer.h[0], "current", config)
    with pytest.raises(ConversionError, match="Linear holds no config: give the one of its model"):
        fe.TransformerLayer.from_hf(nn.Linear(2, 2), "current")
    model = FAMILIES["llama"].build()
    with pytest.raises(ConversionError, match="LlamaMLP is no block of 'llama'"):
        fe.TransformerLayer.from_hf(model.model.layers[0].mlp, "current", model.config)
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["v_proj"]))
    with pytest.raises(ConversionError, match=r"self_attn\.v_proj is a Linear, no plain linear layer"):
        fe.TransformerLayer.from_hf(adapted.base_model.model.model.layers[0], "current")
    with pytest.raises(fe.errors.UnknownName, match="did you mean 'current'"):
        fe.TransformerLayer.from_hf(FAMILIES["llama"].build().model.layers[0], "curent")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_converted_models_block_is_one_too(name: str):
    model = converted(FAMILIES[name].build(), "current")
    block = model.get_submodule(fe.hf.describe(model).blocks[0].name)
    other = FAMILIES[name].build()
    other.load_state_dict(model.state_dict())
    plain = other.get_submodule(fe.hf.describe(other).blocks[0].name)
    x = torch.randn(2, 5, 32)
    assert torch.equal(fe.TransformerLayer.from_hf(block, FP32)(x), fe.TransformerLayer.from_hf(plain, FP32)(x))
