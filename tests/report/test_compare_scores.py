"""Means and standard errors of `fp8engine compare`, held against the same formulas in NumPy; its blocks and batches."""

import copy
import math
import struct
import sys
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from support import converted
from torch import nn

from fp8engine.errors import ConversionError
from fp8engine.report.compare import compare_recipes, picture
from fp8engine.report.compare.batches import BYTES, NOTHING, Batch, Tokens, batches, pieces
from fp8engine.report.compare.scores import Scores, ratio

IDS = [[5, 9, 33, 2, 7], [1, 60, 3, 3, 20, 11, 8, 40, 4], [17, 2, 50], [6, 30, 31]]
TOKENS = Tokens(lambda text: [], pad=0, mask=63)
WORDS = [list(b"some text"), list(b"another, longer text"), list(b"three")]


def losses_of(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    """The loss of each next token of one text, in FP64."""
    values = logits[0, :-1].double().numpy()
    most = values.max(1, keepdims=True)
    normal = most[:, 0] + np.log(np.exp(values - most).sum(1))
    return normal - values[np.arange(len(values)), ids[0, 1:].numpy()]


def test_the_change_of_the_loss_and_its_error_are_paired_over_texts_of_different_lengths():
    """Cochran's error of a ratio, text by text without padding; the error of a plain mean of texts is another."""
    model: Any = tiny_models.llama().eval()
    (result,) = compare_recipes(model, batches(model, IDS, TOKENS, size=3), ["rowwise"]).results
    twin = converted(copy.deepcopy(model), "rowwise")
    sums, counts, same = [], [], []
    for one in IDS:
        ids = torch.tensor([one])
        with torch.no_grad():
            low, high = twin(input_ids=ids).logits, model(input_ids=ids).logits
        sums.append((losses_of(low, ids) - losses_of(high, ids)).sum())
        same.append((low.argmax(-1) == high.argmax(-1))[0, :-1].sum().item())
        counts.append(len(one) - 1)
    for found, totals in ((result.change, sums), (result.top1, same)):
        s, n = np.array(totals, float), np.array(counts, float)
        mean = s.sum() / n.sum()
        error = np.sqrt(4 / 3 * ((s - mean * n) ** 2).sum()) / n.sum()
        assert found is not None
        assert found.error is not None
        # Losses are FP32 numbers near 4 (half an ulp is 2^-23), in padded batches of another order of sums.
        assert found.value == pytest.approx(mean, abs=2e-6)
        assert found.error == pytest.approx(error, abs=2e-6)
    assert abs(sums[1]) > 2e-5  # the tolerance is no bigger than what is measured


@pytest.mark.parametrize("texts", [1, 4])
def test_the_change_in_percent_is_of_the_fp32_loss_and_one_text_has_no_error(texts: int):
    model = tiny_models.llama()
    found = compare_recipes(model, batches(model, IDS[:texts], TOKENS), ["current"])
    result: Any = found.to_dict()["results"][0]
    assert result["change"] != 0
    assert result["change_percent"] == pytest.approx(100 * (result["loss"] / found.loss - 1), rel=1e-6)  # pyright: ignore
    errors = [result[key] for key in ("change_error", "change_percent_error", "top1_error")]
    if texts == 1:
        assert errors == [None] * 3
    else:
        assert errors[1] == pytest.approx(100 * errors[0] / found.loss, rel=1e-12)


class Overflows(nn.Module):
    """Logits of a byte's embedding; under FP8 those of "!" are NaN (as of an overflow), in FP32 they are not."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(256, 32), nn.Linear(32, 32), nn.Linear(32, 256)

    def forward(self, ids: torch.Tensor) -> Any:
        values = self.down(self.up(self.embed(ids)))
        if type(self.up) is not nn.Linear:
            values = values.masked_fill((ids == ord("!")).unsqueeze(-1), math.nan)
        return SimpleNamespace(logits=values)


def test_nan_agrees_with_nothing_and_is_no_number():
    model = Overflows()
    with torch.no_grad():
        model.down.bias[0] = 1e6  # every answer is 0, where argmax finds a NaN too
    found = compare_recipes(model, batches(model, [list(b"a!b!"), list(b"text")], BYTES), ["current"])
    (result,) = found.results
    assert result.top1 is not None
    assert result.top1.value == 6 / 8
    assert math.isnan(result.sqnr_db)
    targets = torch.tensor([[1, 2], [3, 4]])
    scores = Scores()
    logits = torch.zeros(2, 2, 8)
    batch = Batch((), torch.ones(2, 2, dtype=torch.bool), targets)
    broken = logits.clone()
    broken[0, 0] = math.nan
    scores.add(SimpleNamespace(logits=broken), SimpleNamespace(logits=logits), batch)
    assert [math.isnan(each) for each in scores.change] == [True, False]
    assert scores.high == pytest.approx([2 * math.log(8)] * 2, rel=1e-6)
    change = ratio(scores.change, scores.predicted)
    assert change is not None
    assert math.isnan(change.value)


def test_padding_is_no_answer_of_a_token_classifier():
    real = torch.tensor([[True, True, True], [True, False, False]])
    high = torch.tensor([[[1.0, 0.0]] * 3, [[1.0, 0.0]] * 3])
    low = high.clone()
    low[0, 1] = low[1, 1] = low[1, 2] = torch.tensor([0.0, 1.0])  # the last two are padding
    scores, batch = Scores(), Batch((), real, None)
    scores.add(SimpleNamespace(logits=low), SimpleNamespace(logits=high), batch)
    assert (scores.same, scores.answers) == ([2, 1], [3, 1])
    assert scores.output.sqnr_db == pytest.approx(10 * math.log10(4 / 2), abs=1e-12)
    logits = SimpleNamespace(logits=torch.ones(5, 2))
    with pytest.raises(ConversionError, match=r"logits are \[5, 2\] for \[2, 3\] tokens"):
        scores.add(logits, logits, batch)


def test_targets_that_a_batch_lacks_are_none():
    scores = Scores()
    logits = SimpleNamespace(logits=torch.randn(2, 3, 8))
    targets = torch.tensor([[NOTHING] * 3, [1, 2, NOTHING]])
    scores.add(logits, logits, Batch((), torch.ones(2, 3, dtype=torch.bool), targets))
    assert (scores.predicted, scores.same) == ([0, 2], [0, 2])


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (tiny_models.llama, ["model.layers.0", "model.layers.1", "lm_head"]),
        (tiny_models.gpt2, ["transformer.h.0", "transformer.h.1", "lm_head"]),
        (lambda: nn.Sequential(tiny_models.llama()), ["0.model.layers.0", "0.model.layers.1", "0"]),
    ],
)
def test_blocks_of_families(make, want: list[str]):
    model = make()
    (result,) = compare_recipes(model, batches(model, IDS, TOKENS), ["current"]).results
    assert [block.name for block in result.blocks] == want


def test_a_block_has_its_worst_layer_and_the_noise_of_its_output():
    model: Any = tiny_models.llama().eval()
    (batch,) = made = batches(model, IDS, TOKENS)
    (result,) = compare_recipes(model, made, ["current"]).results
    inputs: Any = batch.inputs
    outputs: dict[str, torch.Tensor] = {}
    twin = converted(copy.deepcopy(model), "current")
    for name, run in (("low", twin), ("high", model)):
        hook = run.model.layers[1].register_forward_hook(lambda m, a, y, name=name: outputs.update({name: y}))
        with torch.no_grad():
            run(**inputs)
        hook.remove()
    low, high = (outputs[name][batch.real].double().numpy() for name in ("low", "high"))
    block = result.blocks[1]
    assert block.sqnr_db == pytest.approx(10 * np.log10((high**2).sum() / ((low - high) ** 2).sum()), abs=1e-9)
    inside = [layer.own_sqnr_db for layer in result.layers if layer.name.startswith("model.layers.1.")]
    assert len(inside) == 7
    assert block.own_sqnr_db == min(each for each in inside if each is not None)
    assert result.blocks[2].own_sqnr_db is None  # the head is left alone


def test_a_model_without_blocks_has_its_layers_as_blocks():
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(256, 32), up=nn.Linear(32, 64), down=nn.Linear(64, 32)))
    (result,) = compare_recipes(model, batches(model, WORDS, BYTES), ["current"]).results
    layers = [(layer.name, layer.sqnr_db) for layer in result.layers]
    assert [(block.name, block.sqnr_db) for block in result.blocks] == layers
    assert [name for name, _ in layers] == ["up", "down"]


def drawn(panel: Any) -> list[str]:
    return [text.get_text() for text in panel.texts]


def test_the_picture_has_a_row_a_block_and_says_what_is_no_number(monkeypatch: pytest.MonkeyPatch):
    from matplotlib.figure import Figure

    panel: Any = Figure().subplots()
    picture._heat(panel, [[50.0, 30.04], [math.nan, None], [math.inf, 12.0]])
    assert drawn(panel) == ["50.0", "30.0", "not finite", "-", "equal", "12.0"]
    assert panel.images[0].get_array().shape == (3, 2)
    assert panel.images[0].get_array()[2, 0] == picture.MOST
    model = tiny_models.llama()
    found = compare_recipes(model, batches(model, IDS, TOKENS), ["bf16", "current"])
    image = picture.draw(found)
    assert image is not None
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", image[16:20]) == (800,)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert picture.draw(found) is None


def test_hidden_tokens_are_real_ones_and_the_same_each_time():
    model = transformers.BertForMaskedLM(transformers.BertConfig(**tiny_models._encoder()))
    tokens = Tokens(lambda text: [], pad=0, mask=63)
    ids = [list(range(1, 2 + length)) for length in (1, 2, 30, 60)]
    (first,), (again,) = (batches(model, ids, tokens) for _ in range(2))
    given: Any = first.inputs
    again_given: Any = again.inputs
    hidden = first.targets != NOTHING
    assert torch.equal(given["input_ids"], again_given["input_ids"])
    assert hidden.any(1).all()
    assert not (hidden & ~first.real).any()
    assert (given["input_ids"][hidden] == 63).all()
    assert hidden.sum() < 30  # of 96; 15 % is 14


@pytest.mark.parametrize(
    ("text", "count", "want"),
    [
        ("a\n\nb\n\n\n\nc\n", 9, ["a", "b", "c"]),
        ("a\r\n\r\nb c\r\nd\r\n", 9, ["a", "b c\nd"]),
        (" one line ", 9, ["one line"]),
        ("\n".join("0123456789"), 5, ["0", "2", "4", "6", "8"]),
        (" \n\n ", 9, []),
    ],
)
def test_pieces(text: str, count: int, want: list[str]):
    assert pieces(text, count) == want
