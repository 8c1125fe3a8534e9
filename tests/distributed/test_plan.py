"""fe.distributed.plan: bytes against those of real ranks, equal blocks multiplied, predicted times."""

import pytest
import torch
from torch import nn

from benchmarks.distributed import plan as planned
from benchmarks.distributed.processes import run
from fp8engine.distributed import plan, planner
from fp8engine.distributed.clusters import CLUSTERS, RATE
from fp8engine.errors import ConversionError, ParallelError

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
    assert found["blocks_run"] == [2, 3]
    assert found["blocks"] == 5
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


def test_models_that_take_no_token_ids():
    with pytest.raises(ConversionError, match=r"token ids of shape \[1, 8\]; Sequential raised"):
        plan(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 2, 8)
    assert not torch.distributed.is_initialized(), "another plan may follow"
    with pytest.raises(ConversionError, match="takes an nn\\.Module, not str"):
        plan("llama", 2, 8)  # pyright: ignore[reportArgumentType]


def test_a_process_group_that_is_there(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ParallelError, match="initialised already; plan in a process of its own"):
            plan(planned.Model(), 2, 8)
    finally:
        torch.distributed.destroy_process_group()
