"""Models that users bring as they are: parts in TorchScript, layers without a weight yet, inputs without a dimension."""

import pytest
import torch
from support import converted
from torch import nn

import fp8engine as fe


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
