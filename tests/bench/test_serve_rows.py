"""Arithmetic of benchmarks/serve without vLLM: its gaps, its verdicts, and what it finds in weights that differ."""

import math
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

import fp8engine as fe
from benchmarks.serve.judge import codes_that_differ, exit_code, gap, in_16_bits, least_sqnr, line, paired, row
from benchmarks.serve.reading import BOUNDARY, layers_apart

NAMES = [f"layers.0.{name}_proj" for name in ("q", "k", "v", "o", "gate", "up")]


def sent_and_held() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Codes and scales per row as iter_fp8 sends them, and as vLLM holds them: fused, [K, N]."""
    torch.manual_seed(0)
    held = {"norm.weight": torch.ones(4).bfloat16()}
    sent = dict(held)
    for name in NAMES:
        sent |= {f"{name}.weight": torch.randn(8, 16).to(torch.float8_e4m3fn), f"{name}.weight_scale": torch.rand(8, 1)}
    for fused, parts in {"qkv_proj": NAMES[:3], "o_proj": NAMES[3:4], "gate_up_proj": NAMES[4:]}.items():
        codes = torch.cat([sent[f"{part}.weight"].view(torch.uint8) for part in parts])
        held[f"layers.0.{fused}.weight"] = codes.t().contiguous().view(torch.float8_e4m3fn)
        held[f"layers.0.{fused}.weight_scale"] = torch.cat([sent[f"{part}.weight_scale"] for part in parts])
    return sent, held


def test_the_verdict_is_that_of_every_target():
    met, none, missed = row("a", 0.05, "<= 0.1", True), row("b", 1.0, "", None), row("c", 0.123456, "<= 0.1", False)
    assert (exit_code([met, none]), exit_code([met, missed, none])) == (0, 1)
    assert line(missed) == "MISSED  c: 0.1235  <= 0.1"
    assert line(none).split() == ["b:", "1"]
    assert row("d", 38, "38", True, log=["x"])["log"] == ["x"]


def test_gaps_of_log_probabilities():
    ours = torch.tensor([[0.5, 0.25], [0.125, 1.0]]).log()
    step = math.log(2.0)
    # p99: between the third and the fourth of four
    wanted = {"mean": step / 4, "p99": 0.97 * step, "largest": step, "probability": 0.0625 / 4, "ratio": 1.25}
    assert gap(ours, ours - torch.tensor([[0.0, 0.0], [step, 0.0]])) == pytest.approx(wanted)
    assert gap(ours, ours) == {"mean": 0.0, "p99": 0.0, "largest": 0.0, "probability": 0.0, "ratio": 1.0}


def test_documents_are_paired():
    assert paired([1.0, 2.0, 3.0], [0.9, 1.9, 2.9]) == (pytest.approx(0.1), pytest.approx(0.0, abs=1e-12))
    assert paired([1.0, 3.0], [0.0, 0.0]) == (2.0, pytest.approx(1.0))


def test_codes_and_scales_that_differ_are_counted():
    sent, held = sent_and_held()
    assert codes_that_differ(sent, held) == 0
    held["layers.0.qkv_proj.weight"].view(torch.uint8)[3, 20] ^= 1  # of v
    held["layers.0.gate_up_proj.weight_scale"][9] *= 1 + 2.0**-23  # of up
    sent[f"{NAMES[3]}.weight"].view(torch.uint8)[0, 0] = 0x00
    held["layers.0.o_proj.weight"].view(torch.uint8)[0, 0] = 0x80  # a zero of another sign
    assert codes_that_differ(sent, held) == 3
    held["layers.0.o_proj.weight"] = held["layers.0.o_proj.weight"].bfloat16()
    with pytest.raises(ValueError, match="6 layers were sent in FP8, and vLLM holds 5"):
        codes_that_differ(sent, held)


def test_codes_and_scales_are_sent_as_they_are():
    sent, _ = sent_and_held()
    found = dict(in_16_bits((sent | {"embed.weight": torch.ones(3)}).items()))
    assert {name for name, tensor in found.items() if tensor.dtype == torch.bfloat16} == {"norm.weight", "embed.weight"}
    assert all(found[name] is sent[name] for name in sent if name != "norm.weight")


def test_the_least_sqnr_is_of_the_worst_part():
    sent, held = sent_and_held()
    one = {name: torch.tensor([0.5]) if name.endswith("scale") else tensor for name, tensor in held.items()}
    state = {f"{name}.weight": sent[f"{name}.weight"].float() * 0.5 for name in NAMES}
    noise = torch.randn(8, 16)
    for name, decibels in ((NAMES[2], 20.0), (NAMES[5], 30.0)):
        weight = state[f"{name}.weight"]
        state[f"{name}.weight"] = weight + noise * weight.norm() / noise.norm() * 10 ** (-decibels / 20)
    assert least_sqnr(state, one) == pytest.approx(20.0, abs=0.3)


@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
def test_the_layer_whose_casts_differ_is_found(tmp_path: Path):
    model: Any = tiny_models.llama()
    fe.hf.export(model, tmp_path / "out", "rowwise")
    ours, theirs = (fe.hf.load(tmp_path / "out") for _ in range(2))
    ids = tiny_models.tokens(2)
    assert set(layers_apart(ours, theirs, ids).values()) == {0.0}
    name = "model.layers.0.self_attn.v_proj"
    theirs.get_submodule(name).weight_scale.data.mul_(1.01)
    found = layers_apart(ours, theirs, ids)
    assert BOUNDARY < found.pop(name) == pytest.approx(0.01, rel=0.05)
    assert set(found.values()) == {0.0}
    assert not theirs.get_submodule(name)._forward_hooks
