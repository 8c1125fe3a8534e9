"""Models that users bring as they are: parts in TorchScript, layers without a weight yet, lists of layers with None in
them, inputs without a dimension, towers that no batch has called."""

from typing import Any

import pytest
import torch
from support import converted
from torch import nn

import fp8engine as fe
from fp8engine.convert.select import decide


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("part", [False, True])
def test_torchscript_is_refused_by_name(part: bool):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
    model = nn.Sequential(nn.Linear(16, 16), scripted) if part else scripted
    where = "its part '1'" if part else "the model"
    with pytest.raises(fe.errors.ConversionError, match=f"{where} is TorchScript already.*: convert the plain module"):
        fe.convert(model, "current")
    assert not part or type(model[0]) is nn.Linear


def test_a_layer_without_a_weight_yet_says_when_it_gets_one():
    model = nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 8))
    converted(model, "current")
    reason = fe.inspect(model).layers[0]["reason"]
    assert reason == "its weight is made by its first forward: run the model once before fe.convert"
    model(torch.randn(2, 4))
    converted(model, "current")  # the remedy
    assert [row["recipe"] for row in fe.inspect(model).layers] == ["current", "current"]


def test_an_input_without_a_dimension_is_refused_in_the_words_of_torch():
    plain = nn.Linear(4, 4)
    with pytest.raises(RuntimeError) as torchs:
        plain(torch.tensor(1.0))
    with pytest.raises(fe.errors.ShapeError) as ours:
        converted(nn.Sequential(nn.Linear(4, 4)), "current")(torch.tensor(1.0))
    assert str(ours.value) == f"0: {torchs.value}"


class Distilling(nn.Module):
    """Informer's encoder: a convolution after each block but the last, whose place in the list is None."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])
        self.between = nn.ModuleList([nn.LayerNorm(16), None, None])  # type: ignore[list-item]
        self.nothing = nn.ModuleList([None])  # type: ignore[list-item]

    def forward(self, x):
        for block, between in zip(self.blocks, self.between, strict=True):
            x = block(x) if between is None else between(block(x))
        return x


@pytest.mark.parametrize("recipe", ["current", "auto"])
def test_a_list_of_layers_may_hold_none(recipe: str):
    model, plain = Distilling(), Distilling()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(8, 16)
    converted(model, recipe, example_inputs=(x,))
    y, want = model(x), plain(x)
    assert 0 < (y - want).norm() < 0.15 * want.norm()  # three layers of 28 dB each in a row, and their gains
    assert fe.inspect(model).totals["in_fp8"] == 3
    fe.revert(model)
    assert type(model.get_submodule("blocks.0.0")) is nn.Linear


class TwoTowers(nn.Module):
    """A model of pictures and text, whose batches may lack pictures; `read` is left alone, its weight is read."""

    def __init__(self):
        super().__init__()
        self.pictures = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16))
        self.text, self.read = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x, pictures=None):
        x = x if pictures is None else x + self.pictures(pictures)
        return nn.functional.linear(self.text(x), self.read.weight)


def test_a_tower_that_no_batch_has_called_has_no_share_of_the_flops():
    model = converted(TwoTowers(), "current")
    assert fe.inspect(model).totals["fp8_flops_share"] == 0
    x = torch.randn(4, 16)
    model(x)
    text, read, tower = 16 * 32, 32 * 8, 2 * 16 * 256
    report = fe.inspect(model)
    assert report.totals["never_ran"] == 2
    assert report.totals["fp8_flops_share"] == pytest.approx(text / (text + read))
    assert {row["name"]: row["flops_share"] for row in report.layers}["pictures.0"] == 0
    model(x, x)
    # `text` has seen 8 rows by now, the tower 4, and the median of those that count is for `read`.
    assert fe.inspect(model).totals["fp8_flops_share"] == pytest.approx(
        (8 * text + 4 * tower) / (8 * text + 4 * tower + 4 * read)
    )


class Keys(dict):
    """As many a config: its keys are attributes, and to ask for another attribute is a KeyError."""

    __getattr__ = dict.__getitem__


def test_a_config_whose_keys_are_attributes():
    model: Any = TwoTowers()
    model.config = Keys(num_labels=32)
    with pytest.raises(fe.errors.ParallelError, match="TwoTowers is no model of transformers"):
        fe.distributed.decoder_plan(model)
    converted(model, "current")(torch.randn(4, 16)).sum().backward()
    model.text = nn.Linear(16, 40)
    model.config = Keys(vocab_size=40)
    assert {d.name for d in decide(model, "current") if d.reason.startswith("output head")} == {"text"}


class KimiLinearRMSNorm(nn.RMSNorm):
    """As transformers names the norms of Kimi-Linear."""


def test_a_norm_of_a_family_with_linear_in_its_name_is_no_linear_layer():
    model = nn.Sequential(KimiLinearRMSNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    converted(model, "current")
    model(torch.randn(4, 16))
    report = fe.inspect(model)
    assert [row["name"] for row in report.layers] == ["1", "3"]
    assert report.totals["left_alone"] == 0
    assert report.totals["fp8_flops_share"] == 1
