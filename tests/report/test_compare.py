"""compare_recipes says what it measured: each number held against the same one computed by hand."""

import copy
import io
import json
import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import fp8engine as fe
from fp8engine.errors import ConversionError, UnknownName
from fp8engine.report.compare import compare_recipes, show
from fp8engine.report.compare.batches import BYTES, NOTHING, Batch, Tokens, batches, task_of
from fp8engine.report.compare.scores import Estimate

IDS = [[5, 9, 33, 2, 7], [1, 60, 3, 3, 20, 11, 8, 40, 4], [17, 2, 50], [6, 30, 31]]
TOKENS = Tokens(lambda text: [], pad=0, mask=63)


def t5() -> nn.Module:
    size: dict[str, Any] = {
        "decoder_start_token_id": 0,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 1,
        "num_heads": 2,
    }
    config = transformers.T5Config(**size, vocab_size=64, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def masked_bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**tiny_models._encoder()))


def encoder() -> nn.Module:
    """Its layers do more than pass the embedding on: weights of the usual 0.02 would leave cosines at 0.9999993."""
    return transformers.BertModel(transformers.BertConfig(**tiny_models._encoder(), initializer_range=0.3))


def converted(model: nn.Module, recipe: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fe.errors.EmulationWarning)
        return fe.convert(copy.deepcopy(model), recipe, fuse=False).eval()  # as compare_recipes does


def given(batch: Batch) -> Any:
    return batch.inputs


def number(found: float | None) -> float:
    assert found is not None
    return found


def value(found: Estimate | None) -> float:
    assert found is not None
    return found.value


def sqnr(low: torch.Tensor, high: torch.Tensor) -> float:
    low, high = low.double(), high.double()
    return (10 * torch.log10(high.square().sum() / (low - high).square().sum())).item()


@pytest.mark.parametrize(
    ("make", "task"),
    [
        (tiny_models.gpt2, "causal"),
        (tiny_models.llama, "causal"),
        (masked_bert, "masked"),
        (t5, "seq2seq"),
        (encoder, "none"),
        (tiny_models.bert, "none"),
        (lambda: nn.Linear(2, 2), "none"),
    ],
    ids=["gpt2", "llama", "bert", "t5", "encoder", "classifier", "plain"],
)
def test_what_a_model_is_for(make, task: str):
    assert task_of(make()) == task


@pytest.mark.parametrize("make", [tiny_models.llama, masked_bert, t5], ids=["causal", "masked", "seq2seq"])
def test_losses_and_agreement_are_those_of_the_models_own_loss(make):
    model = make().eval()
    made = batches(model, IDS, TOKENS, size=2)
    found = compare_recipes(model, made, ["rowwise"])
    twin = converted(model, "rowwise")
    sums, count, same = {"own": 0.0, "rowwise": 0.0}, 0, 0
    for batch in made:
        # transformers shifts a causal model's labels itself: those of position t are the ids there
        labels = batch.targets
        if task_of(model) == "causal":
            labels = given(batch)["input_ids"].masked_fill(~batch.real, NOTHING)
        with torch.no_grad():
            inputs = {**given(batch), "labels": labels}
            own, low = model(**inputs), twin(**inputs)
        asked = batch.targets != NOTHING
        count += int(asked.sum())
        sums["own"] += own.loss.item() * int(asked.sum())
        sums["rowwise"] += low.loss.item() * int(asked.sum())
        same += int((own.logits.argmax(-1) == low.logits.argmax(-1))[asked].sum())
    # FP32 sums of at most 20 losses in another order: 20 roundings of 2^-24, relative.
    assert found.loss == pytest.approx(sums["own"] / count, rel=20 * 2**-24)
    (result,) = found.results
    assert result.loss == pytest.approx(sums["rowwise"] / count, rel=20 * 2**-24)
    assert result.loss != found.loss
    assert value(result.top1) == same / count
    assert result.cosine is None
    assert (found.texts, found.tokens) == (4, 20)


def test_padding_changes_nothing():
    """Under rowwise a token's casts see no other token: batches give what single texts give.

    A matmul over more rows may add in another order: relative 2^-24 of y per term, where FP8's own errors are 2^-4;
    64 terms move 10 log10(noise) by less than 64 * 2^-20 * 10 / ln 10 = 3e-4 dB.
    """
    model = encoder()
    padded = compare_recipes(model, batches(model, IDS, TOKENS, size=4), ["rowwise"]).results[0]
    single = compare_recipes(model, batches(model, IDS, TOKENS, size=1), ["rowwise"]).results[0]
    assert value(padded.cosine) == pytest.approx(value(single.cosine), abs=1e-6)
    assert padded.least_cosine == pytest.approx(single.least_cosine, abs=1e-6)
    # Behind several layers a value on the edge between two codes may fall to the other side: of 640 elements, a few.
    assert padded.sqnr_db == pytest.approx(single.sqnr_db, abs=0.1)
    first = padded.layers[0], single.layers[0]
    assert first[0].own_sqnr_db == pytest.approx(first[1].own_sqnr_db, abs=3e-4)


def test_cosines_are_of_each_texts_mean():
    model = encoder().eval()
    twin = converted(model, "current")
    with torch.no_grad():  # one text at a time: nothing is padded
        ids = [torch.tensor([one]) for one in IDS]
        pairs = [(twin(input_ids=one)[0].double().mean(1), model(input_ids=one)[0].double().mean(1)) for one in ids]
    want = [F.cosine_similarity(low, high).item() for low, high in pairs]
    (result,) = compare_recipes(model, batches(model, IDS, TOKENS, size=1), ["current"]).results
    assert value(result.cosine) == pytest.approx(sum(want) / 4, abs=1e-12)
    assert result.least_cosine == pytest.approx(min(want), abs=1e-12)
    assert (result.loss, result.top1) == (None, None)


def test_a_classifiers_answers_agree_or_not():
    model = tiny_models.bert().eval()
    (batch,) = batches(model, IDS, TOKENS)
    (result,) = compare_recipes(model, [batch], ["current"]).results
    low, high = converted(model, "current")(**given(batch)).logits, model(**given(batch)).logits
    assert value(result.top1) == ((low.argmax(-1) == high.argmax(-1)).sum() / 4).item()
    assert result.sqnr_db == pytest.approx(sqnr(low, high), abs=1e-9)


def test_a_layers_two_sqnrs():
    """Of the second layer: alone it sees the model's own input, in the model that of the first one's FP8 output."""
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    made = batches(model, [list(b"some bytes")], BYTES)
    (result,) = compare_recipes(model, made, ["current"]).results
    twin = converted(model, "current")
    with torch.no_grad():
        (x,) = given(made[0])
        first, inner = model[:2](x), model[:3](x)
        want_first, want_own = sqnr(twin[:2](x), first), sqnr(twin[3](inner), model[3](inner))
        want_inside = sqnr(twin(x), model(x))
    by_name = {layer.name: layer for layer in result.layers}
    assert by_name["1"].own_sqnr_db == by_name["1"].sqnr_db == pytest.approx(want_first, abs=1e-9)
    assert by_name["3"].own_sqnr_db == pytest.approx(want_own, abs=1e-9)
    assert by_name["3"].sqnr_db == pytest.approx(want_inside, abs=1e-9)
    assert want_inside < want_own


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "blockwise"])
def test_a_planted_bad_layer_is_found(recipe: str):
    """A column of huge weights meets an input that is always 0: it sets the scale, and all other weights flush to 0."""
    model: Any = tiny_models.llama()
    layer = model.model.layers[1]
    with torch.no_grad():
        layer.post_attention_layernorm.weight[0] = 0
        layer.mlp.gate_proj.weight[:, 0] = 1e6
    (result,) = compare_recipes(model, batches(model, IDS, TOKENS), [recipe]).results
    worst = result.worst()
    assert worst is not None
    assert worst.name == "model.layers.1.mlp.gate_proj"
    assert worst.own_sqnr_db == pytest.approx(0, abs=1e-6)  # y' = 0: the noise is the signal
    others = [one for one in result.layers if one.recipe != "none" and one is not worst]
    assert len(others) == 13
    assert min(number(one.own_sqnr_db) for one in others) > 20
    down = next(one for one in result.layers if one.name == "model.layers.1.mlp.down_proj")
    assert number(down.sqnr_db) < 5 < 20 < number(down.own_sqnr_db)  # a victim, not guilty


class Victim(nn.Module):
    """The first layer loses W x, and keeps its bias; without the bias nothing is left for the second."""

    def __init__(self):
        super().__init__()
        self.embed, self.guilty, self.victim = nn.Embedding(256, 32), nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        with torch.no_grad():
            self.embed.weight[:, 0] = 0
            self.guilty.weight[:, 0] = 1e6

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.victim(self.guilty(self.embed(ids)) - self.guilty.bias)


def test_a_layer_that_gets_a_bad_input_is_not_the_worst():
    model = Victim()
    (result,) = compare_recipes(model, batches(model, [list(b"some text")], BYTES), ["current"]).results
    guilty, victim = result.layers
    assert number(victim.sqnr_db) == pytest.approx(0, abs=1e-6)  # its FP8 input is 0
    assert 0.01 < number(guilty.sqnr_db) < 20 < number(victim.own_sqnr_db)
    assert result.worst() is guilty


class Odd(nn.Module):
    """A head before the body, a layer never called, one called twice, one that gives NaN."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 32), nn.Linear(32, 32)
        self.twice, self.never, self.wild = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        nn.init.constant_(self.wild.weight, math.nan)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.twice(self.head(self.embed(ids))))
        self.wild(x)
        return x


def test_what_json_holds():
    model = Odd()
    found = compare_recipes(model, batches(model, [list(b"text")], BYTES), ["current", "rowwise"])
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert set(told) == {"model", "dtype", "loss", "texts", "tokens", "results"}
    assert (told["model"], told["dtype"], told["texts"], told["tokens"]) == ("Odd", "float32", 1, 4)
    assert [result["recipe"] for result in told["results"]] == ["current", "rowwise"]
    result = told["results"][0]
    estimates = {f"{key}{error}" for key in ("change", "change_percent", "top1", "cosine") for error in ("", "_error")}
    numbers = {"loss", "least_cosine", "sqnr_db", "fp8_flops_share", *estimates}
    assert set(result) == {"recipe", "emulated", "worst_layer", "layers", "blocks", "chosen", *numbers}
    assert (result["top1"], result["cosine_error"]) == (None, None)  # no answers; one text
    layers = {layer["name"]: layer for layer in result["layers"]}
    assert set(layers["head"]) == {"name", "shape", "recipe", "reason", "own_sqnr_db", "sqnr_db", "note"}
    assert layers["head"]["recipe"] == "none"
    assert "output head" in layers["head"]["reason"]
    assert layers["head"]["note"] == "sqnr_db: equal"
    assert layers["never"]["note"] == "own_sqnr_db: not comparable; sqnr_db: not comparable"
    assert layers["wild"]["note"] == "own_sqnr_db: not finite; sqnr_db: not finite"
    assert 15 < layers["twice"]["sqnr_db"] < layers["twice"]["own_sqnr_db"] < 45
    assert layers["twice"]["note"] == ""
    assert result["worst_layer"] == "wild"


def test_tables_name_what_matters_and_leave_out_what_is_not_there():
    def shown(table) -> str:
        printed = io.StringIO()
        Console(width=160, file=printed).print(table)
        return printed.getvalue()

    model = Odd()
    found = compare_recipes(model, batches(model, [list(b"text")], BYTES), ["current"])
    text = shown(show.table(found))
    assert "cosine" in text
    assert "loss" not in text
    assert "top-1" not in text
    found = compare_recipes(model, batches(model, [list(b"text")], BYTES), ["bf16", "current", "rowwise"])
    lines = shown(show.layer_table(found)).splitlines()
    assert "the worst 2 of 2 converted layers" in lines[0]
    (line,) = [line for line in lines if "twice" in line]
    own = [layer.own_sqnr_db or 0 for result in found.results for layer in result.layers if layer.name == "twice"]
    assert line.replace("│", " ").split()[2:] == [f"{sqnr:.1f}" for sqnr in own]
    assert show.layer_table(replace(found, results=found.results[:1])) is None  # BF16 has no worst layer
    assert [word for line in lines for word in ("wild", "twice") if word in line] == ["wild", "twice"]


def test_layers_left_alone_are_said_once_for_all_recipes_that_leave_them():
    model = tiny_models.mixtral()
    found = compare_recipes(model, batches(model, IDS, TOKENS), ["current", "rowwise"])
    lines = show.left_alone(found)
    assert [line.split(":")[1].strip() for line in lines][-1] == "lm_head"
    assert any("mlp.gate and 1 more: router" in line for line in lines)
    assert len(lines) == len(set(lines)) == 2
    half = replace(found, results=[found.results[0], replace(found.results[1], layers=[])])
    assert all(line.startswith("left alone under current: ") for line in show.left_alone(half))


@pytest.mark.parametrize("make", [tiny_models.gpt2, tiny_models.albert, tiny_models.mixtral, t5])
def test_every_family_runs_and_every_layer_is_listed(make):
    model = make()
    (result,) = compare_recipes(model, batches(model, IDS, TOKENS), ["current"]).results
    names = {layer.name for layer in result.layers}
    modules = dict(model.named_modules())
    assert names <= set(modules)
    assert {n for n, m in modules.items() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"} <= names
    assert all(number(layer.own_sqnr_db) > 20 for layer in result.layers if layer.recipe != "none")
    assert result.sqnr_db > 6  # noise under half of the signal


def test_the_model_is_left_as_it_was():
    model: Any = tiny_models.gpt2().train()
    model.lm_head.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    compare_recipes(model, batches(model, IDS, TOKENS), ["delayed"])
    assert model.training
    assert not model.lm_head.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(random, torch.get_rng_state())
    fe_layers = [module for module in model.modules() if isinstance(module, fe.Linear)]
    assert fe_layers == []


def test_what_it_refuses():
    model = tiny_models.llama()
    made = batches(model, IDS, TOKENS)
    with pytest.raises(UnknownName, match="did you mean 'current'"):
        compare_recipes(model, made, ["curent"])
    with pytest.raises(ConversionError, match="no batches"):
        compare_recipes(model, [], ["current"])
    with pytest.raises(ConversionError, match="converted already"):
        compare_recipes(converted(model, "current"), made, ["current"])
    with pytest.raises(ConversionError, match="the text is empty"):
        batches(model, [[], [1]], TOKENS)
    with pytest.raises(ConversionError, match="token id 64, and LlamaForCausalLM has embeddings for 64"):
        batches(model, [[1, 64]], TOKENS)
    plain = nn.Sequential(nn.Embedding(256, 8))
    with pytest.raises(ConversionError, match="Sequential has no linear layers"):
        compare_recipes(plain, batches(plain, [[1, 2]], BYTES), ["current"])
    only_a_head: Any = nn.ModuleDict({"embed": nn.Embedding(256, 8), "lm_head": nn.Linear(8, 8)})
    only_a_head.forward = lambda ids: only_a_head.lm_head(only_a_head.embed(ids))
    with pytest.raises(ConversionError, match="nothing to convert in ModuleDict"):
        compare_recipes(only_a_head, batches(only_a_head, [[1, 2]], BYTES), ["current"])
    wide = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ConversionError, match="Sequential cannot be run on token ids: RuntimeError"):
        compare_recipes(wide, batches(wide, [[1, 2]], BYTES), ["current"])
