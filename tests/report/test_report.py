"""fe.inspect: what it says of planted numbers, under every name a layer can have, and in every form it is printed."""

import csv
import dataclasses
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support import converted
from torch import nn

import fp8engine as fe
from fp8engine.cli.inspect import describe
from fp8engine.convert.swap import plan
from fp8engine.report.collect import DECIDED, NEVER_RAN
from fp8engine.report.page import page
from fp8engine.report.state import controllers_of
from fp8engine.report.table import COLUMNS, SLOT_COLUMNS
from fp8engine.scaling.choice import in_16_bits, recipe_of
from fp8engine.scaling.table import ROLES


class Mixed(nn.Module):
    """One layer of each fate; `twice` is called twice, `unused` never, and `head` is an output head."""

    def __init__(self):
        super().__init__()
        self.first, self.wide = nn.Linear(32, 64), nn.Linear(64, 48)
        self.twice, self.unused = nn.Linear(48, 48), nn.Linear(8, 4)
        self.sixteen, self.lm_head = nn.Linear(48, 16), nn.Linear(16, 100)

    def forward(self, x):
        return self.lm_head(self.sixteen(self.twice(self.twice(self.wide(self.first(x))))))


def mixed() -> nn.Module:
    model = converted(Mixed(), "current", overrides={"wide": "rowwise_gw_hp", "sixteen": "bf16"})
    model(torch.randn(2, 5, 32)).sum().backward()
    return model


def by_name(model: nn.Module) -> dict[str, Any]:
    return {layer["name"]: layer for layer in fe.inspect(model).layers}


def test_the_share_of_flops_by_hand():
    """10 rows a call; matmuls in FP8: 3 of 3, 2 of 3 (wgrad in 16 bits), none.

    A layer whose rows nothing counts (16 bits, left alone) is taken to have seen the median of the counted ones: of 10,
    10 and 20, 10.  A converted layer that the first forward neither called nor read has multiplied nothing.
    """
    report = fe.inspect(mixed())
    fp8 = 10 * 32 * 64 * 3 / 3 + 10 * 64 * 48 * 2 / 3 + 20 * 48 * 48
    other = 10 * 64 * 48 * 1 / 3 + 10 * (48 * 16 + 16 * 100)
    assert report.totals["fp8_flops_share"] == pytest.approx(fp8 / (fp8 + other), rel=1e-12)  # a few FP64 roundings
    counts = [report.totals[key] for key in ("layers", "converted", "left_alone", "never_ran", "emulated")]
    assert counts == [6, 5, 1, 1, 3]
    assert [report.totals[key] for key in ("in_fp8", "in_fp8_in_part", "in_16_bits")] == [3, 1, 1]
    assert [layer["rows"] for layer in report.layers] == [10, 10, 20, 0, 0, None]


SIZE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZE["intermediate_size"] = 64


def jetmoe() -> Any:
    """Its experts are called `weight`; the one layer in FP8 projects k and v."""
    routed: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return hf.JetMoeForCausalLM(hf.JetMoeConfig(**SIZE, **routed, num_key_value_heads=2, kv_channels=16))


def dbrx() -> Any:
    """w1, v1 and w2 are [experts * F, K]; q, k, v and o are in FP8."""
    attention = {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0}
    ffn = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
    config = hf.DbrxConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=64, attn_config=attention, ffn_config=ffn)
    model = hf.DbrxForCausalLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)  # transformers leaves the experts' as they come
    return model


HEADS, ROUTER = 64 * 32, 4 * 32
FEW_EXPERTS = {  # FLOPs of a token in FP8 and elsewhere, how many expert layers of which class, one's shape, its reason
    jetmoe: (64 * 32, 2 * (128 * 32 + 32 * 64 + 2 * 32 * 32) + 2 * ROUTER + HEADS, (4, "JetMoeParallelExperts"),
             [4, 128, 32], "keeps its experts in one 3-D parameter"),
    dbrx: (64 * 32 + 32 * 32, 2 * 3 * 48 * 32 + ROUTER + HEADS, (3, "DbrxExpertGLU"),
           [4, 48, 32], "one after the other in a 2-D parameter"),
}  # fmt: skip


@pytest.mark.parametrize("make", FEW_EXPERTS)
def test_experts_count_as_many_times_as_a_token_passes_them(make):
    fp8, other, (count, kind), shape, reason = FEW_EXPERTS[make]
    model = converted(make(), "current")
    model(torch.arange(4)[None])
    report = fe.inspect(model)
    assert report.totals["fp8_flops_share"] == pytest.approx(fp8 / (fp8 + other))
    rows = [layer for layer in report.layers if layer["kind"] == kind]
    assert len(rows) == count
    (first, *_) = [row for row in rows if row["shape"] == shape]
    assert first["experts"] == [2, 4]
    assert reason in first["reason"]
    share = 2 * shape[1] * shape[2] / (fp8 + other)
    assert f"2 of 4 a token, {share:.1%} of the model's linear FLOPs" in first["reason"]
    planned = describe(model, plan(fe.revert(model), "current"))  # the CLI's
    assert planned["totals"]["fp8_flops_share"] == report.totals["fp8_flops_share"]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_token_passes_all_matrices_of_a_layer_of_groups(groups: int):
    """ConvBERT's are no nn.Linear; each of 2 multiplies half of the features by a quarter of a whole weight."""
    config = hf.ConvBertConfig(**SIZE, embedding_size=32, num_groups=groups)
    model = converted(hf.ConvBertModel(config), "current")
    model(torch.arange(4)[None])
    fp8 = 4 * 16 * 32 + 9 * 16 + 32 * 32  # q, k, v and the convolution's, its kernel, the output
    mlp = 2 * 64 * 32 // groups
    whole, seen = fp8 + mlp, fp8 if groups == 2 else fp8 + mlp
    assert fe.inspect(model).totals["fp8_flops_share"] == pytest.approx(seen / whole)


def test_to_dict_has_the_designs_keys_in_types_of_json():
    told = fe.inspect(mixed()).to_dict()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert set(told) == {"layers", "totals", "decisions", "alarms", "outliers"}
    assert told["decisions"] == told["alarms"] == told["outliers"] == []
    keys = {"name", "kind", "shape", "recipe", "backend", "emulated", "reason", *ROLES, "output"}
    counts = {"saturated", "underflowed", "nonfinite", "recasts", "calls", "elements"}
    slot = {"cast", "format", "scale", "amax", *counts}
    for layer in told["layers"]:
        assert keys <= set(layer)
        if layer["recipe"] in ("current", "rowwise_gw_hp"):
            assert all(slot <= set(layer[role]) for role in ROLES)
    assert {"fp8_flops_share", "converted", "left_alone"} <= set(told["totals"])
    first = told["layers"][0]
    assert (first["kind"], first["shape"], first["output"]["format"]) == ("Linear", [64, 32], "float32")
    assert [first[role]["format"] for role in ROLES] == ["E4M3", "E4M3", "E5M2"]


def test_each_layer_says_what_ran_and_why():
    layers = by_name(mixed())
    assert {name: (layer["recipe"], layer["backend"], layer["emulated"]) for name, layer in layers.items()} == {
        "first": ("current", "reference", True),
        "wide": ("rowwise_gw_hp", "reference", True),
        "twice": ("current", "reference", True),
        "unused": ("current", "none", False),
        "sixteen": ("bf16", "torch", False),
        "lm_head": ("none", "torch", False),
    }
    reasons = {name: layer["reason"] for name, layer in layers.items()}
    assert "emulated: " in reasons["first"]
    assert "no FP8 Tensor Cores" in reasons["first"]
    assert reasons["unused"] == NEVER_RAN
    assert reasons["sixteen"] == "asked for bf16"
    assert reasons["lm_head"].startswith("output head")


def test_left_alone_reasons_are_converts():
    class Own(nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    model = nn.Sequential(nn.Linear(8, 8), Own(8, 8), nn.Linear(8, 8), nn.Linear(8, 8).double())
    reasons = {name: row["reason"] for name, row in by_name(converted(model, skip=lambda name, _: name == "2")).items()}
    assert reasons["1"] == "Own is a subclass of nn.Linear with code of its own"
    assert reasons["2"] == "skip() returned True"
    assert reasons["3"].startswith("its weight is torch.float64")


def test_a_model_that_nobody_converted():
    report = fe.inspect(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    (layer,) = report.layers
    assert (layer["recipe"], layer["backend"], layer["reason"]) == ("none", "torch", "not converted: call fe.convert")
    assert report.totals["fp8_flops_share"] == report.totals["converted"] == 0
    empty = fe.inspect(nn.ReLU())
    assert (empty.layers, empty.totals["fp8_flops_share"]) == ([], 0.0)
    assert "0 left alone" in empty.table()


@pytest.mark.parametrize(
    "call",
    [fe.inspect, fe.scaling_state, fe.scaling_state_dict, lambda model: fe.load_scaling_state_dict(model, {})],
    ids=["inspect", "scaling_state", "scaling_state_dict", "load_scaling_state_dict"],
)
def test_what_is_no_module_is_named(call, request: pytest.FixtureRequest):
    name = request.node.callspec.id
    with pytest.raises(fe.errors.ConversionError, match=f"^{name} takes an nn.Module, the model itself, not int$"):
        call(3)


def test_planted_losses_are_counted():
    """x has 64 elements: amax 448 makes s 1, so that 5 of 2^-12 are below half the smallest subnormal (2^-10)."""
    layer = fe.Linear(16, 4, bias=False, recipe="current")
    nn.init.ones_(layer.weight)
    x = torch.ones(4, 16)
    x[0, 0], x[1, :5] = 448.0, 2.0**-12
    layer(x)
    slot = fe.inspect(layer).layers[0]["input"]
    assert (slot["amax"], slot["scale"]) == (448.0, 1.0)
    assert (slot["underflowed"], slot["sampled"], slot["saturated"]) == (5 / 64, 1.0, 0.0)
    x[2, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    layer(x)
    report = fe.inspect(layer)
    slot = report.layers[0]["input"]
    # Flushed elements are counted on the first call of 16, of which they remain the share.
    assert (slot["nonfinite"], slot["calls"], slot["sampled"], slot["underflowed"]) == (3, 2, 0.5, 5 / 64)
    # In all: 128 elements of x and of w (cast twice, then kept), of which 64 + 64 were looked at.
    assert report.totals["nonfinite"] == 3
    assert report.totals["sampled"] == pytest.approx((64 + 64) / 256)
    assert report.totals["underflowed"] == pytest.approx(5 / (64 + 64))
    text = report.table(every=True)
    assert "nothing saturated\n" in text
    assert "3 elements were NaN or Inf and stayed so" in text
    assert f"from a sample of {128 / 256:.1%} of the elements" in text
    (row,) = [line.split("│") for line in text.splitlines() if "reference" in line]
    assert [cell.strip() for cell in row[7:9]] == ["0 / 0 / -", "7.81% / 0 / -"], "no backward came"


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise"])
def test_a_model_that_only_answers_has_counters_and_no_amax_or_scale(recipe: str, tmp_path: Path):
    layer = fe.Linear(16, 4, recipe=recipe)
    with torch.no_grad():
        layer(torch.ones(4, 16))
    report = fe.inspect(layer)
    slot = report.layers[0]["input"]
    assert (slot["amax"], slot["scale"], slot["calls"], slot["elements"]) == (None, None, 1, 64)
    report.to_csv(tmp_path / "report.csv")
    (row,) = csv.DictReader((tmp_path / "report.csv").read_text().splitlines())
    assert (row["input.amax"], row["input.scale"], row["input.nonfinite"]) == ("", "", "0")
    json.dumps(report.to_dict(), allow_nan=False)
    report.to_html(tmp_path / "report.html")
    layer(torch.full((4, 16), 448.0)).sum().backward()
    slot = fe.inspect(layer).layers[0]["input"]
    scale = None if recipe == "delayed" else 1.0  # None is predicted yet; per row: the largest of the rows'
    assert (slot["amax"], slot["scale"]) == (448.0, scale)


def test_planted_saturation_is_counted_and_recast():
    """Step 1 predicts s = 448 for step 2, under which the 3 elements of 4 saturate; 2^-22 of slack does not hide 1."""
    layer = fe.Linear(16, 4, recipe=fe.delayed(history=2))
    x = torch.ones(4, 16)
    for large in (1.0, 4.0):
        x.flatten()[:3] = large
        layer(x.clone()).sum().backward()
    report = fe.inspect(layer)
    slot = report.layers[0]["input"]
    assert (slot["saturated"], slot["recasts"], slot["amax"]) == (3 / 128, 1, 4.0)
    total = sum(report.layers[0][role]["elements"] for role in ROLES)
    assert report.totals["saturated"] == pytest.approx(3 / total)
    assert report.totals["recasts"] == 1
    assert "1 tensors saturated under a predicted scale" in report.table()


def test_csv_read_back_is_the_dict(tmp_path: Path):
    report = fe.inspect(mixed())
    report.to_csv(tmp_path / "report.csv")
    with open(tmp_path / "report.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(report.layers) == 6
    for row, layer in zip(rows, report.layers, strict=True):
        for key in COLUMNS:
            wanted = "x".join(map(str, layer["shape"])) if key == "shape" else str(layer[key])
            assert row[key] == wanted, key
        for role in ROLES:
            for key in SLOT_COLUMNS:
                found, wanted = row[f"{role}.{key}"], layer[role].get(key)
                assert (found == "") if wanted is None else (type(wanted)(found) == wanted), f"{role}.{key}"


def test_the_table_says_it_in_words():
    report = fe.inspect(mixed())
    text = report.table(every=True)
    lines = {line.split("│")[0].strip(): line for line in text.splitlines() if "│" in line}
    words = {"first": "reference (emulated)", "wide": "E4M3 per row (power of 2)", "unused": NEVER_RAN}
    words["lm_head"] = by_name(mixed())["lm_head"]["reason"]
    assert [name for name, word in words.items() if word not in lines[name]] == []
    assert lines["sixteen"].split("│")[2].strip() == "bf16"
    share = f"{report.totals['fp8_flops_share']:.1%} of linear-layer FLOPs in FP8"
    assert f"{share}; 3 of 6 layers in FP8 (3 emulated, 1 with some matmuls in 16 bits)" in text
    assert ", 1 converted in 16 bits, 1 never ran, 1 left alone" in text
    assert str(report) == report.table()
    assert max(map(len, report.table(width=100).splitlines()[:-1])) <= 100


def one_of_four() -> fe.Report:
    """Four equal layers, of which the first has run in FP8 and the others in BF16, as they were asked to."""
    asked = {"1": "bf16", "2": "bf16", "3": "bf16"}
    model = converted(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), "current", overrides=asked)
    model(torch.randn(8, 32)).sum().backward()
    return fe.inspect(model)


def test_a_layer_in_16_bits_is_not_counted_as_one_in_fp8():
    report = one_of_four()
    assert [report.totals[key] for key in ("in_fp8", "in_fp8_in_part", "in_16_bits", "left_alone")] == [1, 0, 3, 0]
    summary = "25.0% of linear-layer FLOPs in FP8; 1 of 4 layers in FP8 (1 emulated), 3 converted in 16 bits, "
    assert summary in str(report)
    cards = [" ".join(re.sub(r"<.*?>", " ", each).split()) for each in page(report).split('<div class="card')[1:]]
    (card,) = [words for words in cards if "layers in FP8" in words]
    assert card.endswith("layers in FP8 1 of 4 3 in 16 bits, 0 left alone, 0 never ran")


def test_layers_that_auto_puts_into_16_bits_are_counted_there():
    """One of two layers is given the choice that `auto` makes where FP8 is slower; the cells of its step stay."""
    model = converted(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), fe.auto(interval=16))
    for step in range(3):
        model.zero_grad()
        model(torch.randn(64, 32)).square().sum().backward()
        if step == 1:
            (controller,) = controllers_of(model)
            choice = in_16_bits(controller.choices[0], "slower")
            controller.layers[0].adopt(recipe_of(controller.recipe, choice, 0))
    report = fe.inspect(model)
    assert [report.totals[key] for key in ("layers", "in_fp8", "in_16_bits", "left_alone")] == [2, 1, 1, 0]
    assert report.layers[0]["reason"] == DECIDED


def test_shares_of_what_was_not_measured_are_not_printed_as_zero():
    """Of a layer in BF16, of one that never ran, and of a report in which none ran."""
    report = one_of_four()
    rows = [[cell.strip() for cell in line.split("│")] for line in report.table(every=True).splitlines() if "│" in line]
    lost = {row[0]: row[-2:] for row in rows[1:]}
    assert lost == {"0": ["0 / 0 / 0"] * 2} | dict.fromkeys("123", ["- / - / -"] * 2)
    table = page(report).partition('<section id="layers"')[2].partition("</section>")[0]
    told = [re.findall(r"<td[^>]*>([^<]*)</td>", row)[-2:] for row in table.split("<tr>")[2:]]
    assert told == [["0 / 0 / 0 %"] * 2, *[["–"] * 2] * 3]
    for unread in (fe.inspect(converted(nn.Linear(8, 8))), fe.inspect(converted(nn.Linear(8, 8), "bf16"))):
        assert "nothing saturated" not in unread.table()
        assert "0 / 0 / 0" not in unread.table(every=True)
        assert "nothing was cast" in page(unread)
        assert "0 %" not in page(unread).partition('<div class="cards">')[2].partition("<section")[0]


def test_a_weight_that_is_computed_in_training_is_not_computed_anew():
    """spectral_norm's power iteration moves when its weight is read in training."""
    model = converted(nn.Sequential(nn.Linear(32, 16)), "rowwise")
    nn.utils.parametrizations.spectral_norm(model[0])
    model(torch.randn(4, 32))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert fe.inspect(model).layers[0]["shape"] == [16, 32]
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(module.training for module in model.modules())


def test_names_are_printed_as_they_are():
    """rich would read [brackets] as markup and :colons: as pictures."""
    named = dataclasses.replace(fe.current(), name="[bold]mine[/bold]")
    text = str(fe.inspect(converted(nn.ModuleDict({":cat:": nn.Linear(8, 8), "[x]": nn.Linear(8, 8)}), named)))
    assert "[bold]mine[/bold]" in text
    assert ":cat:" in text
    assert "[x]" in text


def test_a_compiled_model_reports_that_it_ran():
    model = converted(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)), "delayed")
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(6, 16)).sum().backward()
    for report in (fe.inspect(model), fe.inspect(compiled)):
        assert [(row["backend"], row["rows"], row["ran"]) for row in report.layers] == [("reference", 6, True)] * 2
        assert report.totals["fp8_flops_share"] == 1.0
        assert report.layers[0]["grad_output"]["elements"] == 6 * 32


def test_a_report_is_plain_data_that_a_process_without_the_model_reads():
    """Bytes of a layer, at most: its row has 100 numbers of 10 bytes and 1 kB of text; its three sampled slots have 512
    counts of 4 bytes and 8 samples of 68 each; its decisions take 2 kB.  Together 12 kB, where a weight has 1 MB.
    """
    model = converted(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), fe.auto(interval=1))
    for step in range(6):
        model(torch.randn(64, 512)).square().mean().backward()
        model.zero_grad()
        if step == 3:
            report = fe.inspect(model)
            pickled = pickle.dumps(report)
    assert len(pickled) < 12_000 * len(report.layers)
    assert pickle.dumps(report) == pickled, "training goes on, and the report stays as it was"
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).table(100), end='')"
    ran = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, check=True)
    assert ran.stdout.decode() == report.table(100)
    assert len(report.auto.samples) == 3 * len(report.layers)


@pytest.mark.parametrize("recipe", ["current", "rowwise", "delayed"])
def test_a_frozen_weight_whose_copy_is_read_again_has_its_amax(recipe: str):
    """Nothing is cast in the later steps; the largest finite magnitude of the weight stands in the report anyway."""
    model = nn.Linear(32, 16)
    model.weight.requires_grad_(False)
    model.weight.data[0, :2] = torch.tensor([-7.0, float("inf")])
    model = converted(nn.Sequential(model), recipe)
    for _ in range(4):
        model(torch.randn(4, 32, requires_grad=True)).sum().backward()
    (layer,) = fe.inspect(model).layers
    assert (layer["kept_why"], layer["weight"]["amax"]) == ("frozen", 7.0)
