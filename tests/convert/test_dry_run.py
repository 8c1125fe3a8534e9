"""Layers whose weight other code reads, found before the first forward: FP8 codes there would be multiplied by."""

import time
from typing import Any

import pytest
import torch
import transformers
from reading_models import Asks, Eva, Keys, Model
from support import converted
from torch import nn
from torch.nn import functional as F

import fp8engine as fe
from fp8engine.convert.dry_run import asked_for_dtype, uncalled


class Reads(nn.Module):
    """`read` is multiplied by and never called, `both` is read and called, `asked` is asked for its dtype alone."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.plain, self.read, self.both, self.asked = (nn.Linear(width, width) for _ in range(4))
        self.filled = nn.Linear(width, width)  # by other code called: parts[0].filled(x)
        nn.init.constant_(self.filled.weight, 0.5)

    def forward(self, x):
        x = self.asked(self.plain(x).to(self.asked.weight.dtype))
        x = self.both(x) + F.linear(x, self.both.weight)
        return F.linear(x, self.read.weight, self.read.bias)


class Turns(nn.Module):
    """Calls `first` in training and reads its weight in evaluation, as torch's encoder layer; random in training."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        if self.training:
            return self.last(F.dropout(self.first(x), 0.5))
        return self.last(F.linear(x, self.first.weight))


class AsksInside(nn.Module):
    """Casts two inputs to the dtype of a layer that another module holds: no dry run comes to its end."""

    def __init__(self):
        super().__init__()
        self.keys = Keys(scale=2.0)
        self.inside: Any = nn.ModuleDict({"proj": nn.Linear(16, 16), "other": nn.Linear(16, 16)})
        self.own = nn.Linear(16, 16)

    def forward(self, x, y):
        dtype = self.inside.proj.weight.dtype
        return self.own(self.inside.proj(x.to(dtype)) + self.keys.scale * y.to(dtype).norm().item())


class Typed(nn.Module):
    """Has a `dtype` as transformers' models have one, that of its first parameter, and casts two inputs to it."""

    def __init__(self, **parts: nn.Module):
        super().__init__()
        self.parts, self.first, self.second = nn.ModuleDict(parts), nn.Linear(16, 16), nn.Linear(16, 16)

    @property
    def dtype(self) -> torch.dtype:
        return next(parameter.dtype for parameter in self.parameters())

    def forward(self, x, y):
        return self.first(x.to(self.dtype)) + y.to(self.dtype).norm().item()


class AsksPart(Typed):
    """Casts to the `dtype` of a part; its inputs have one too, which no layer has to keep."""

    def forward(self, x, y):
        return self.first(x.to(self.parts.inside.dtype)) + y.to(x.dtype).norm().item()


def test_the_dtype_of_a_model_is_that_of_its_first_layer():
    """Granite Speech casts to its own, Nemotron 3.5 Transcribe to that of a part."""
    own, part = Typed(), Typed(norm=nn.LayerNorm(16))
    assert asked_for_dtype(own).keys() == {id(own.first)}
    assert not asked_for_dtype(part), "its first parameter is of a norm"
    model: Any = AsksPart(inside=AsksPart(), other=AsksPart())
    assert asked_for_dtype(model).keys() == {id(model.parts.inside.first)}


def test_code_of_two_inputs_that_asks_for_a_dtype_is_read():
    """SigLIP 2's and BLIP-2's: codes there made the model loaded from an export refuse its first input."""
    model: Any = AsksInside()
    why = "AsksInside casts to the dtype of its weight, which codes would make FP8"
    assert asked_for_dtype(model) == {id(model.inside.proj): why}
    assert not uncalled(model)
    converted(model, "rowwise")  # the converted layers are asked as the plain ones
    assert asked_for_dtype(model) == {id(model.inside.proj): why}


def test_a_dry_run_tells_and_draws_no_random_number():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model: Any = Model(Eva(hidden=False), Turns(), Asks(), nn.TransformerEncoderLayer(16, 2))
    torch.set_rng_state(before)
    assert uncalled(model) == {
        id(model.parts[0].qkv): "Eva reads its weight and never calls it",
        id(model.parts[3].self_attn.out_proj): "MultiheadAttention reads its weight and never calls it",
    }
    assert asked_for_dtype(model).keys() == {id(model.parts[1].first), id(model.parts[2].one)}
    assert torch.equal(torch.get_rng_state(), before)
    with torch.device("meta"):
        large = Model(*(Eva(8192, hidden=False) for _ in range(100)))
    begin = time.perf_counter()
    assert len(uncalled(large)) == 100
    assert time.perf_counter() - begin < 1, "about 10 ms: one of a class is run, without numbers"


@pytest.mark.parametrize("kind", [Reads, type("Inherits", (Reads,), {})])
def test_code_that_reads_a_weight_and_never_calls_the_layer_is_found_before_it_runs(kind: type[nn.Module]):
    """Else frozen="fp8" and exports would store codes that other code multiplies by."""
    model, x = Model(kind()).requires_grad_(False), torch.randn(2, 16)
    with pytest.warns(fe.errors.FrozenWarning, match="asked.*casts to the dtype of its weight, which codes would make"):
        converted(model, "rowwise", frozen="fp8", overrides={"*.both": "bf16"})
    found: Any = model.parts[0]
    assert {name: found.get_submodule(name).weight.dtype.itemsize for name in found._modules} == {
        "plain": 1, "read": 4, "both": 4, "asked": 4, "filled": 1,
    }  # fmt: skip
    assert model(x).isfinite().all()
    why = {row["name"]: row["reason"] for row in fe.inspect(model).layers}
    assert why["parts.0.read"] == f"{kind.__name__} reads its weight and never calls it"
    assert "reads its weight" not in why["parts.0.both"]
    with pytest.raises(fe.errors.StrictError, match="reads its weight and never calls it"):
        fe.convert(Model(kind()), "rowwise", strict=True)


SIZE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
TOWER = {**SIZE, "intermediate_size": 64, "num_attention_heads": 2}
TOWERS = {
    "vision_config": {**TOWER, "num_patches": 16, "patch_size": 4},
    "text_config": {**TOWER, "projection_size": 32},
}
T5 = {"vocab_size": 64, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2}


@pytest.mark.parametrize(
    ("name", "options", "read", "asked"),
    [
        ("Mamba", SIZE, {"dt_proj"}, set()),
        ("FalconMamba", SIZE, {"dt_proj"}, set()),
        ("Jamba", {**SIZE, "num_attention_heads": 2, "num_key_value_heads": 1}, {"dt_proj"}, set()),
        ("T5", T5, set(), {"wo"}),
        ("MT5", T5, set(), {"wo"}),
        ("Siglip2", TOWERS, {"out_proj"}, {"patch_embedding"}),
        ("Nemotron3_5TranscribeAudio", {}, set(), {"projection"}),
        ("GraniteSpeech", {}, set(), {"input_linear"}),
        ("Rwkv", SIZE, set(), {"output", "value"}),
        ("Llama", {**SIZE, "num_attention_heads": 2}, set(), set()),
    ],
)
def test_families_that_read_weights(name: str, options: dict, read: set[str], asked: set[str]):
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(getattr(transformers, f"{name}Config")(**options))
    names = {id(module): path.rpartition(".")[2] for path, module in model.named_modules()}
    assert {names[each] for each in uncalled(model)} == read
    assert {names[each] for each in asked_for_dtype(model)} == asked
