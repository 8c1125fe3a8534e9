"""Plans of Hugging Face models in folders are what the same models send and hold on two real ranks."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine import _torch
from fp8engine.cli import app
from fp8engine.distributed.step import Saved, groups_of
from fp8engine.distributed.traffic import Traffic

pytest.importorskip("transformers")

RANKS, BATCH, SEQUENCE, BLOCKS, WORDS = 2, 1, 16, 4, 64
SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": BLOCKS,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
}
# name: (family, what its config says, dtype of the checkpoint, recipe, options of the command)
CASES: dict[str, tuple[str, dict[str, Any], torch.dtype, str, tuple[str, ...]]] = {
    "tied": ("Llama", {"tie_word_embeddings": True}, torch.float32, "rowwise", ()),
    "bf16": ("Llama", {}, torch.bfloat16, "current", ()),
    "gqa": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}, torch.bfloat16, "blockwise", ()),
    "auto": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}, torch.bfloat16, "auto", ()),
    "checkpointing": ("Llama", {}, torch.float32, "rowwise", ("--checkpointing",)),
    "tp": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}, torch.bfloat16, "rowwise", ("--tp", "2")),
    "tp, checkpointing": (
        "Llama",
        {"tie_word_embeddings": True},
        torch.bfloat16,
        "current",
        ("--tp", "2", "--checkpointing"),
    ),
}


def saved_model(folder: Path, case: str) -> str:
    """A folder with a checkpoint, as `save_pretrained` writes it."""
    import transformers

    family, config, dtype, *_ = CASES[case]
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZE, **config))
    made.to(dtype).save_pretrained(folder / case)
    return str(folder / case)


def real_steps(rank: int, ranks: int, folder: str) -> dict:
    """Of each case, what one rank sent and held in a step that took no samples."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {}
    for case, (*_, recipe, options) in CASES.items():
        model: Any = AutoModelForCausalLM.from_pretrained(f"{folder}/{case}", dtype=torch.float32)
        parameters, tp = sum(p.numel() for p in model.parameters()), ranks if "--tp" in options else 1
        if "--checkpointing" in options:
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
        made = fe.auto(freeze_after=0) if recipe == "auto" else recipe  # which takes no samples, and decides nothing
        fe.convert(model, made)
        if tp > 1:
            fe.distributed.tensor_parallel(model, mesh, fe.distributed.decoder_plan(model), dim="tp")
        fe.distributed.fsdp(model, mesh=mesh["dp"], mp_policy=policy)
        sequences = BATCH * tp
        found[case] = {"count": parameters, **one_step(model, sequences, groups_of(mesh))}
    return found


def one_step(model: Any, sequences: int, groups: dict[str, str]) -> dict[str, Any]:
    saved, ids = Saved(), torch.randint(WORDS, (sequences, SEQUENCE))
    with Traffic(groups) as traffic:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
            loss = model(ids, use_cache=False).logits.float().square().mean()
        activations = saved.bytes(less=model.parameters())
        loss.backward()
    sent = traffic.to_dict()
    sent.pop("tp all-reduce int32", None)  # whether tokens are equally many, which no card is asked
    return {
        "traffic": sent,
        "parameters": sum(_torch.local_tensor(p).nbytes for p in model.parameters()),
        "gradients": sum(_torch.local_tensor(p.grad).nbytes for p in model.parameters()),
        "saved activations": activations,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("models")
    for case in CASES:
        saved_model(where, case)
    return where


@pytest.fixture(scope="module")
def real(folder: Path) -> dict:
    return run(real_steps, RANKS, str(folder))[0]


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_what_two_ranks_send_and_hold(case: str, folder: Path, real: dict):
    *_, recipe, options = CASES[case]
    asked = ["plan", str(folder / case), "--ranks", RANKS, "--tokens", BATCH * SEQUENCE, "-r", recipe, "--json"]
    told = CliRunner().invoke(app, [str(word) for word in (*asked, *options)])
    assert told.exit_code == 0, told.output
    found, measured = json.loads(told.stdout), real[case]
    assert found["parameters"] == measured["count"]
    assert found["blocks_run"] == [2, 3]
    sent = found["traffic"]["FP8 gather"]
    assert {k: {"bytes": each["bytes"], "calls": each["calls"]} for k, each in sent.items()} == measured["traffic"]
    held, kinds = found["memory"]["FP8 gather"], ("parameters", "gradients", "saved activations")
    assert {kind: held[kind] for kind in kinds} == {kind: measured[kind] for kind in kinds}


@pytest.mark.nightly
@pytest.mark.slow
def test_a_70b_model_over_eight_cards_a_layer_takes_no_memory_of_its_size():
    """Half a minute: tensors without memory.  Four times a block all tokens of eight cards are gathered and summed."""
    tokens, blocks, width, tp = 8192, 80, 8192, 8
    result = CliRunner().invoke(app, ["plan", "llama-3-70b", "--ranks", "64", "--tp", str(tp), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["parameters"], told["blocks"], told["tensor_parallel"]) == (70_553_706_496, blocks, "run")
    sent = told["traffic"]["16 bits"]["tp reduce-scatter bfloat16"]["bytes"]
    assert sent == blocks * 4 * (tp - 1) * tokens * width * 2
    assert told["traffic"]["FP8 gather"]["tp all-gather uint8"]["bytes"] < 0.51 * sent
