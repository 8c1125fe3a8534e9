"""fe.distributed.plan: bytes against those of real ranks, equal blocks multiplied, predicted times."""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from typer.testing import CliRunner

import fp8engine as fe
from benchmarks.distributed import plan as planned
from benchmarks.distributed.processes import run
from fp8engine import _torch
from fp8engine.cli import app
from fp8engine.distributed import plan, planner
from fp8engine.distributed.clusters import CLUSTERS, RATE
from fp8engine.distributed.step import Saved, groups_of
from fp8engine.distributed.traffic import Traffic
from fp8engine.errors import ConversionError, ParallelError

transformers: Any = pytest.importorskip("transformers")
RANKS, RECIPES = planned.RANKS, planned.RECIPES
BATCH, SEQUENCE = planned.IDS


@pytest.fixture(scope="module")
def real() -> dict:
    """What rank 0 of four gloo processes sent and held; None: fully_shard in 16 bits."""
    return run(planned.real_step, RANKS, [None, *RECIPES], (BATCH, SEQUENCE))[0]


def planned_step(recipe: str = "rowwise", **options) -> dict:
    with torch.device("meta"):
        model = planned.Model()
    return plan(model, RANKS, BATCH * SEQUENCE, recipe, sequence=SEQUENCE, **options).to_dict()


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_are_those_of_real_ranks(real, recipe):
    found = planned_step(recipe)
    assert (found["blocks_run"], found["blocks"]) == ([2, 3], 5)
    for way, measured in (("16 bits", real[None]), ("FP8 gather", real[recipe])):
        sent = {kind: {"bytes": each["bytes"], "calls": each["calls"]} for kind, each in found["traffic"][way].items()}
        assert sent == measured["traffic"], way
        for kind in ("parameters", "gradients", "saved activations"):
            assert found["memory"][way][kind] == measured[kind], (way, kind)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_equal_blocks_multiplied_are_the_blocks_run(monkeypatch, recipe):
    multiplied = planned_step(recipe)
    monkeypatch.setattr(planner, "_stack", lambda model: None)
    whole = planned_step(recipe)
    assert multiplied.pop("blocks_run") == [2, 3]
    assert whole.pop("blocks_run") == [5]
    assert multiplied == whole


def test_unequal_blocks_are_all_run():
    model = planned.Model()
    model.blocks[3].up = nn.Linear(planned.WIDTH, planned.HIDDEN, bias=False)
    assert plan(model, RANKS, SEQUENCE).to_dict()["blocks_run"] == [5]


@pytest.mark.slow
def test_fp8_gather_sends_half_and_the_model_is_left_alone():
    model = planned.Model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    found = plan(model, 64, SEQUENCE).to_dict()
    linear = 5 * 2 * 4 * planned.WIDTH * planned.HIDDEN  # bytes of BF16, and of both gathers of two weights
    high, low = (
        sum(each["bytes"] for kind, each in found["traffic"][way].items() if kind.startswith("all-gather"))
        for way in ("16 bits", "FP8 gather")
    )
    # Each rank's shard is padded to ceil(rows / 64): 6 of 333 / 64 rows, 3 of 129 / 64.
    codes = 5 * 2 * 63 * (6 * planned.WIDTH + 3 * planned.HIDDEN)
    assert high - low == codes
    assert linear / 2 < codes < 0.75 * linear
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert type(model.blocks[0].up) is nn.Linear
    assert not torch.distributed.is_initialized()


def test_predicted_times_follow_the_formulas():
    found = planned_step()
    (cluster, *_) = CLUSTERS
    ways = found["predicted"][cluster.name]
    sent = sum(each["bytes"] for each in found["traffic"]["16 bits"].values())
    assert ways["16 bits"]["communication"] == pytest.approx(sent / cluster.nvlink)
    tokens = BATCH * SEQUENCE
    # Three matmuls of each weight, 2 FLOPs an element.
    linear = 6 * tokens * planned.WIDTH * (5 * 2 * planned.HIDDEN + planned.WORDS)
    assert ways["16 bits"]["compute"] == pytest.approx(linear / RATE, rel=1e-9)
    assert ways["FP8 gather"]["compute"] == ways["FP8, 16-bit gather"]["compute"]
    assert ways["FP8 gather"]["communication"] < ways["FP8, 16-bit gather"]["communication"]


@pytest.mark.slow
def test_tensor_parallel_by_formula():
    """Two of four cards share each layer: shards over two, half of each weight, and the blocks' rows gathered."""
    one, two = planned_step(), planned_step(tp=2)
    rows = SEQUENCE * BATCH * planned.WIDTH
    assert two["traffic"]["16 bits"]["tp all-gather bfloat16"]["bytes"] == 5 * 4 * rows * 2
    assert two["traffic"]["FP8 gather"]["tp all-gather uint8"]["bytes"] == 5 * 4 * (rows + 4 * SEQUENCE * BATCH)
    assert two["traffic"]["FP8 gather"]["tp reduce-scatter bfloat16"]["bytes"] == 5 * 4 * rows * 2
    gathers = [each["traffic"]["16 bits"]["all-gather bfloat16"]["bytes"] for each in (one, two)]
    assert gathers[1] / gathers[0] == pytest.approx(1 / 2 / 2 / (3 / 4), rel=0.02)  # shards of odd rows are padded


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (6, {"tp": 4}, "ranks=6 is not a multiple of tp=4"),
        (0, {}, "ranks=0 is not a multiple of tp=1"),
        (4, {"sequence": 7}, "tokens=48 is not a multiple of sequence=7"),
    ],
)
def test_numbers_that_do_not_divide(ranks, options, message):
    with pytest.raises(ParallelError, match=message):
        plan(planned.Model(), ranks, 48, **options)


def test_models_that_take_no_token_ids(caplog: pytest.LogCaptureFixture):
    torch_s = logging.getLogger("torch")
    torch_s.addHandler(caplog.handler)  # it does not hand its records on
    with pytest.raises(ConversionError, match=r"token ids of shape \[1, 8\]; Sequential raised"):
        plan(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8)), 2, 8)
    torch_s.removeHandler(caplog.handler)
    assert caplog.records == []  # torch's own log of the same error, with its traceback
    assert not torch.distributed.is_initialized(), "another plan may follow"
    with pytest.raises(ConversionError, match="takes an nn\\.Module, not str"):
        plan("llama", 2, 8)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("group")
def test_a_process_group_that_is_there():
    with pytest.raises(ParallelError, match="initialised already; plan in a process of its own"):
        plan(planned.Model(), 2, 8)


# Of models of transformers, each in a folder as `save_pretrained` writes it, planned by the command for two ranks.
TOKENS, WORDS = 16, 64
SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
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
    "both": ("Llama", {"tie_word_embeddings": True}, torch.bfloat16, "current", ("--tp", "2", "--checkpointing")),
}


def real_steps(rank: int, ranks: int, folder: str) -> dict:
    """Of each case, what one rank sent and held in a step that took no samples."""
    warnings.simplefilter("ignore")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {}
    for case, (*_, recipe, options) in CASES.items():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{case}", dtype=torch.float32)
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
        found[case] = {"count": parameters, **one_step(model, tp, groups_of(mesh))}
    return found


def one_step(model: Any, sequences: int, groups: dict[str, str]) -> dict[str, Any]:
    saved, ids = Saved(), torch.randint(WORDS, (sequences, TOKENS))
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
    """Of each case a folder with a checkpoint, as `save_pretrained` writes it."""
    where = tmp_path_factory.mktemp("models")
    for case, (family, config, dtype, *_) in CASES.items():
        made = getattr(transformers, f"{family}Config")(**SIZE, **config)
        getattr(transformers, f"{family}ForCausalLM")(made).to(dtype).save_pretrained(where / case)
    return where


@pytest.fixture(scope="module")
def real_models(folder: Path) -> dict:
    return run(real_steps, 2, str(folder))[0]


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_what_two_ranks_send_and_hold(case: str, folder: Path, real_models: dict):
    *_, recipe, options = CASES[case]
    asked = ["plan", str(folder / case), "--ranks", 2, "--tokens", TOKENS, "-r", recipe, "--json"]
    told = CliRunner().invoke(app, [str(word) for word in (*asked, *options)])
    assert told.exit_code == 0, told.output
    found, measured = json.loads(told.stdout), real_models[case]
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
