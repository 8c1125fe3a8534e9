"""fe.convert on every family: results near fp32's, gradients everywhere, a true report, checkpointing and generate().

How near: a product of two E4M3 operands has 28 dB SQNR or better (each operand 31.6 dB for Gaussian data, DESIGN
section 7; tests/reference measures it).  Errors of `depth` layers that meet in one output add as powers, and no layer
makes the signal smaller than its own output is, so the output has 28 - 10 log10(depth) dB.  Softmax, GELU and the gate
of an MLP change an error by a factor near 1: 3 dB are left for that and for chance.
In backward each layer also reads dy in E5M2 (25 dB): depth * (10^-2.8 + 10^-2.5) of noise, and the same 3 dB.

That nothing outside of the matmuls changes: tests/convert/test_fuse.py.
"""

import copy
import math
from typing import Any

import pytest
import torch
from hf_families import FAMILIES, Family
from hf_fusing import logits
from support import FP8_RECIPES, converted, same, sqnr, tables
from torch import nn
from transformers.pytorch_utils import Conv1D

import fp8engine as fe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)

# Layers that are left in 16 bits by default, the output heads, and what chooses experts.
LEFT = {
    "RobertaForSequenceClassification": {"classifier.out_proj"},
    "BertForSequenceClassification": {"classifier"},
    "DistilBertForSequenceClassification": {"classifier"},
    "AlbertForSequenceClassification": {"classifier"},
    "ViTForImageClassification": {"classifier"},
    "CLIPModel": {"visual_projection", "text_projection"},
    "WhisperForConditionalGeneration": {"proj_out"},
}
ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.few(60)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
@every_family
def test_logits_loss_and_gradients(family: Family, recipe: str):
    plain = family.build_smooth()
    model = converted(copy.deepcopy(plain), recipe)
    if recipe == "delayed":  # from the second step on, scales come from the window
        model(**family.batch()).loss.backward()
        model.zero_grad()
    batch = family.batch(rows=32)  # a mean over few rows has a large error of its own
    want, found = plain(**batch), model(**batch)
    want.loss.backward()
    found.loss.backward()
    forward, backward = 10**-2.8 * family.depth, 10**-2.5 * family.depth
    assert sqnr(logits(want), logits(found)) > -10 * math.log10(forward) - 3
    assert sqnr(logits(want), logits(found)) < 40, "FP8 it is"
    assert found.loss.item() == pytest.approx(want.loss.item(), rel=0.02)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name
    assert sqnr(gradients(plain), gradients(model)) > -10 * math.log10(forward + backward) - 3


@every_family
def test_the_report_lists_every_matrix_and_what_it_ran(family: Family):
    model = converted(family.build(), "delayed")
    rows: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):

            def count(module: nn.Module, args: tuple, y: torch.Tensor, name: str = name) -> None:
                rows[name] = rows.get(name, 0) + y.numel() // y.shape[-1]

            module.register_forward_hook(count)
    model(**family.batch()).loss.backward()
    report = fe.inspect(model)
    listed = {row["name"]: row for row in report.layers}
    left = LEFT.get(family.model, {"lm_head"})
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        kind = type(model.get_submodule(owner)).__name__
        if parameter.dim() == 3 and "experts" in owner:
            row, tokens = listed.pop(name), rows["model.layers.0.self_attn.q_proj"]
            assert (row["recipe"], row["emulated"]) == ("delayed", True)
            assert row["rows"] == tokens * model.config.num_experts_per_tok, name
            assert row["grad_output"]["calls"] == row["input"]["calls"] == row["weight"]["calls"] == 1
        elif parameter.dim() == 2 and key == "weight" and "Embedding" not in kind:
            row = listed.pop(owner)
            fp8 = owner not in left and not owner.endswith(ROUTERS)
            assert (row["recipe"] == "delayed") is fp8, owner
            assert row["emulated"] is row["ran"] is True if fp8 else row["backend"] == "torch"
            if fp8:
                assert (row["rows"], row["input"]["calls"] > 0) == (rows[owner], True), owner
                assert row["grad_output"]["calls"] == row["input"]["calls"] > 0, owner
            else:
                assert row["reason"].startswith(("output head", "router")), owner
    assert listed == {}, "nothing is listed that does not exist"
    assert report.totals["never_ran"] == 0
    assert sum(row["flops_share"] for row in report.layers) == pytest.approx(1)


def test_experts_count_as_often_as_they_run():
    """By hand, one block, rows R: attention R (2 * 32 * 32 + 2 * 32 * 16), experts R * 2 of 4 * (128 * 32 + 32 * 64).

    The router R * 4 * 32; the head R * 64 * 32.
    """
    model = converted(FAMILIES["mixtral"].build(num_hidden_layers=1))
    model(**FAMILIES["mixtral"].batch()).loss.backward()
    attention, experts, others = 2 * 32 * 32 + 2 * 32 * 16, 2 * (128 * 32 + 32 * 64), 4 * 32 + 64 * 32
    report = fe.inspect(model)
    share = {row["name"].rpartition(".")[2]: row["flops_share"] for row in report.layers}
    total = attention + experts + others
    assert share["gate_up_proj"] == pytest.approx(2 * 128 * 32 / total)
    assert share["down_proj"] == pytest.approx(2 * 32 * 64 / total)
    assert report.totals["fp8_flops_share"] == pytest.approx((attention + experts) / total)
    (row,) = [row for row in report.layers if row["name"].endswith("gate_up_proj")]
    said = f"; 2 of 4 a token, {share['gate_up_proj']:.1%} of the model's linear FLOPs"
    assert row["reason"].endswith(said)
    apart = converted(FAMILIES["mixtral"].build(num_hidden_layers=1), overrides={"*.experts.*": "fp32"})
    assert [row["flops_share"] for row in fe.inspect(apart).layers] == pytest.approx(
        [row["flops_share"] for row in report.layers]
    ), "left alone, or not yet run, they count as often"


CAN_CHECKPOINT = {name: family for name, family in FAMILIES.items() if name != "albert"}  # transformers refuses ALBERT


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.few(20)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", CAN_CHECKPOINT.values(), ids=CAN_CHECKPOINT)
def test_checkpointing_changes_no_bit(family: Family, reentrant: bool):
    """Attention is "eager": torch's fused attention rounds by the alignment of its memory, and T5 differs from itself.

    Where a decoder reads an encoder, reentrant checkpoints add the encoder's gradients in another order, in fp32 as
    here: an FP32 ulp may move a gradient across an FP8 rounding boundary, a step of 2^-2 at most on few elements.
    """
    first = converted(family.build(attn_implementation="eager"), "delayed").train()
    second = copy.deepcopy(first)
    second.gradient_checkpointing_enable({"use_reentrant": reentrant})
    batches = [family.batch(rows=2) for _ in range(2)]
    runs = []
    for model in (first, second):
        if hasattr(model, "enable_input_require_grads"):
            model.enable_input_require_grads()  # reentrant checkpoints need an input that takes a gradient
        losses = []
        for batch in batches:  # the second step runs on scales that the first has recorded
            output = model(**batch, **({"use_cache": False} if family.generates else {}))
            output.loss.backward()
            losses.append(output.loss.detach())
        runs.append((losses, [p.grad for p in model.parameters() if p.grad is not None], tables(model)[:2]))
    (losses, grads, state), (again, regrads, restate) = runs
    assert same(losses, again)
    if family.kind in ("sequences", "sounds") and reentrant:
        for one, other in zip(grads, regrads, strict=True):
            assert (one - other).norm() <= 1e-2 * one.norm()
    else:
        assert same(grads, regrads)
        assert same(state, restate)


GENERATES = {name: family for name, family in FAMILIES.items() if family.generates}
NEW = 5


def generate(model: Any, start: dict, **options: Any) -> Any:
    return model.generate(**start, max_new_tokens=NEW, min_new_tokens=NEW, **{"do_sample": False, **options})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.few(20)
@pytest.mark.parametrize("recipe", ["rowwise", "current", "delayed"])
@pytest.mark.parametrize("family", GENERATES.values(), ids=GENERATES)
def test_the_cache_changes_no_more_than_its_rounding(family: Family, recipe: str):
    """A scale per row is a token's own: the cache changes nothing but the order of FP32 sums.

    A scale per tensor comes from all the tokens of one forward, and with a cache that is one token: another rounding of
    the same values, so both are as near to fp32 as said above, and to each other within twice that noise.
    """
    model = converted(family.build_smooth(), recipe)
    if recipe == "delayed":
        model(**family.batch()).loss.backward()
    batch = family.batch(rows=2)
    start = {key: batch[key] for key in ("input_ids", "input_features") if key in batch}
    found = generate(model, start, output_logits=True, return_dict_in_generate=True)
    cached = torch.stack(found.logits, 1)
    given = (
        {"input_ids": found.sequences} if family.kind == "causal" else start | {"decoder_input_ids": found.sequences}
    )
    with torch.no_grad():
        whole = model(**given).logits[:, -NEW - 1 : -1]
    assert cached.shape == whole.shape
    if recipe == "rowwise":
        # FP32 sums in another order, and a value at a rounding boundary that falls to the other side.
        assert sqnr(whole, cached) > 40
        uncached = generate(model, start, use_cache=False)
        assert torch.equal(uncached, found.sequences[:, -uncached.shape[1] :])  # Whisper leaves out the first token
    else:
        assert sqnr(whole, cached) > 28 - 10 * math.log10(2 * family.depth) - 3
