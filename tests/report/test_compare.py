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
from support import sqnr
from torch import nn
from torch.nn import functional as F

import fp8engine as fe
from fp8engine.errors import ConversionError, UnknownName
from fp8engine.report.compare import compare_recipes, show
from fp8engine.report.compare.batches import BYTES, NOTHING, Tokens, batches, task_of

IDS = [[5, 9, 33, 2, 7], [1, 60, 3, 3, 20, 11, 8, 40, 4], [17, 2, 50], [6, 30, 31]]
TOKENS = Tokens(lambda text: [], pad=0, mask=63)


def t5() -> nn.Module:
    size: dict[str, Any] = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    size |= {"vocab_size": 64, "pad_token_id": 0, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**size))


def compared(model: nn.Module, made: Any, *recipes: str) -> list[Any]:
    return compare_recipes(model, made, recipes).results


def masked_bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**tiny_models._encoder()))


def encoder() -> nn.Module:
    """Its layers do more than pass the embedding on: weights of the usual 0.02 would leave cosines at 0.9999993."""
    return transformers.BertModel(transformers.BertConfig(**tiny_models._encoder(), initializer_range=0.3))


def converted(model: nn.Module, recipe: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fe.errors.EmulationWarning)
        return fe.convert(copy.deepcopy(model), recipe, fuse=False).eval()  # as compare_recipes does


@pytest.mark.parametrize("make", [tiny_models.llama, masked_bert, t5], ids=["causal", "masked", "seq2seq"])
def test_losses_and_agreement_are_those_of_the_models_own_loss(make):
    model = make().eval()
    made: Any = batches(model, IDS, TOKENS, size=2)
    found = compare_recipes(model, made, ["rowwise"])
    twin = converted(model, "rowwise")
    sums, count, same = {"own": 0.0, "rowwise": 0.0}, 0, 0
    for batch in made:
        # transformers shifts a causal model's labels itself: those of position t are the ids there
        labels = batch.targets
        if task_of(model) == "causal":
            labels = batch.inputs["input_ids"].masked_fill(~batch.real, NOTHING)
        with torch.no_grad():
            inputs = {**batch.inputs, "labels": labels}
            own, low = model(**inputs), twin(**inputs)
        asked = batch.targets != NOTHING
        count += int(asked.sum())
        sums["own"] += own.loss.item() * int(asked.sum())
        sums["rowwise"] += low.loss.item() * int(asked.sum())
        same += int((own.logits.argmax(-1) == low.logits.argmax(-1))[asked].sum())
    # FP32 sums of at most 20 losses in another order: 20 roundings of 2^-24, relative.
    assert found.loss == pytest.approx(sums["own"] / count, rel=20 * 2**-24)
    result: Any = found.results[0]
    assert result.loss == pytest.approx(sums["rowwise"] / count, rel=20 * 2**-24)
    assert result.loss != found.loss
    assert result.top1.value == same / count
    assert result.cosine is None
    assert (found.texts, found.tokens) == (4, 20)


def test_padding_changes_nothing():
    """Under rowwise a token's casts see no other token: batches give what single texts give.

    A matmul over more rows may add in another order: relative 2^-24 of y per term, where FP8's own errors are 2^-4;
    64 terms move 10 log10(noise) by less than 64 * 2^-20 * 10 / ln 10 = 3e-4 dB.
    """
    model = encoder()
    padded = compared(model, batches(model, IDS, TOKENS, size=4), "rowwise")[0]
    single = compared(model, batches(model, IDS, TOKENS, size=1), "rowwise")[0]
    assert padded.cosine.value == pytest.approx(single.cosine.value, abs=1e-6)
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
    (result,) = compared(model, batches(model, IDS, TOKENS, size=1), "current")
    assert result.cosine.value == pytest.approx(sum(want) / 4, abs=1e-12)
    assert result.least_cosine == pytest.approx(min(want), abs=1e-12)
    assert (result.loss, result.top1) == (None, None)


def test_a_classifiers_answers_agree_or_not():
    model = tiny_models.bert().eval()
    batch: Any
    (batch,) = batches(model, IDS, TOKENS)
    (result,) = compared(model, [batch], "current")
    low, high = converted(model, "current")(**batch.inputs).logits, model(**batch.inputs).logits
    assert result.top1.value == ((low.argmax(-1) == high.argmax(-1)).sum() / 4).item()
    assert result.sqnr_db == pytest.approx(sqnr(high, low), abs=1e-9)


def test_a_layers_two_sqnrs():
    """Of the second layer: alone it sees the model's own input, in the model that of the first one's FP8 output."""
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    made: Any = batches(model, [list(b"some bytes")], BYTES)
    (result,) = compared(model, made, "current")
    twin = converted(model, "current")
    with torch.no_grad():
        (x,) = made[0].inputs
        first, inner = model[:2](x), model[:3](x)
        want_first, want_own = sqnr(first, twin[:2](x)), sqnr(model[3](inner), twin[3](inner))
        want_inside = sqnr(model(x), twin(x))
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
    (result,) = compared(model, batches(model, IDS, TOKENS), recipe)
    worst = result.worst()
    assert worst is not None
    assert worst.name == "model.layers.1.mlp.gate_proj"
    assert worst.own_sqnr_db == pytest.approx(0, abs=1e-6)  # y' = 0: the noise is the signal
    others = [one for one in result.layers if one.recipe != "none" and one is not worst]
    assert len(others) == 13
    assert min(one.own_sqnr_db for one in others) > 20
    down = next(one for one in result.layers if one.name == "model.layers.1.mlp.down_proj")
    assert down.sqnr_db < 5 < 20 < down.own_sqnr_db  # a victim, not guilty


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
    found = compare_recipes(model, batches(model, [list(b"text")], BYTES), ["bf16", "current", "rowwise"])
    text = shown(show.table(found))
    assert "cosine" in text
    assert "loss" not in text
    assert "top-1" not in text
    lines = shown(show.layer_table(found)).splitlines()
    assert "the worst 2 of 2 converted layers" in lines[0]
    (line,) = [line for line in lines if "twice" in line]
    own = [layer.own_sqnr_db or 0 for result in found.results for layer in result.layers if layer.name == "twice"]
    assert line.replace("│", " ").split()[2:] == [f"{sqnr:.1f}" for sqnr in own]
    assert show.layer_table(replace(found, results=found.results[:1])) is None  # BF16 has no worst layer
    left = [replace(layer, recipe="none", own_sqnr_db=None) for layer in found.results[0].layers]
    beside = replace(found, results=[replace(found.results[0], layers=left), *found.results[1:]])
    (line,) = [line for line in shown(show.layer_table(beside)).splitlines() if "twice" in line]
    assert line.replace("│", " ").split()[2:] == ["-", *(f"{sqnr:.1f}" for sqnr in own[1:])]
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
    (result,) = compared(model, batches(model, IDS, TOKENS), "current")
    names = {layer.name for layer in result.layers}
    modules = dict(model.named_modules())
    assert names <= set(modules)
    assert {n for n, m in modules.items() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"} <= names
    assert all(layer.own_sqnr_db > 20 for layer in result.layers if layer.recipe != "none")
    assert result.sqnr_db > 6  # noise under half of the signal


@pytest.mark.parametrize("recipe", ["delayed", "auto"])
def test_the_model_is_left_as_it_was(recipe: str):
    model: Any = tiny_models.gpt2().train()
    model.lm_head.eval()
    model.transformer.wpe.weight.requires_grad_(False)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    compare_recipes(model, batches(model, IDS, TOKENS), [recipe])
    assert model.training
    assert not model.lm_head.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == trained
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(random, torch.get_rng_state())
    assert fe.inspect(model).totals["converted"] == 0


def test_what_it_refuses():
    model, plain = tiny_models.llama(), nn.Sequential(nn.Embedding(256, 8))
    made, bytes_read = batches(model, IDS, TOKENS), batches(plain, [[1, 2]], BYTES)
    head: Any = nn.ModuleDict({"embed": nn.Embedding(256, 8), "lm_head": nn.Linear(8, 8)})
    head.forward = lambda ids: head.lm_head(head.embed(ids))
    wide = nn.Sequential(nn.Linear(8, 8))
    for told, call in {
        "did you mean 'current'": lambda: compare_recipes(model, made, ["curent"]),
        "no batches": lambda: compare_recipes(model, [], ["current"]),
        "converted already": lambda: compare_recipes(converted(model, "current"), made, ["current"]),
        "the text is empty": lambda: batches(model, [[], [1]], TOKENS),
        "token id 64, and LlamaForCausalLM has embeddings for 64": lambda: batches(model, [[1, 64]], TOKENS),
        "Sequential has no linear layers": lambda: compare_recipes(plain, bytes_read, ["current"]),
        "nothing to convert in ModuleDict": lambda: compare_recipes(head, bytes_read, ["current"]),
        "Sequential cannot be run on token ids: RuntimeError": lambda: compare_recipes(wide, bytes_read, ["current"]),
    }.items():
        with pytest.raises((ConversionError, UnknownName), match=told):
            call()
