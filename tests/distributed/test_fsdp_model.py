"""A model under fe.distributed.fsdp, as other code sees it: parameters, state_dict, single blocks, reports."""

import copy
import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import fp8engine as fe
from benchmarks.distributed.fsdp import Net
from benchmarks.distributed.processes import run
from fp8engine.autograd.gathered import GatheredWeight
from fp8engine.distributed.traffic import Traffic

SIZE = (33, 65)  # uneven on two ranks


def net(recipe: str = "current", shard: bool = True) -> Any:
    torch.manual_seed(0)
    model = Net(*SIZE)
    fe.convert(model, recipe, skip=lambda name, module: False)
    return fe.distributed.fsdp(model) if shard else model


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(8, SIZE[0], generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, rank: int, steps: int = 2, optimizer=None) -> None:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_parameters(rank: int) -> dict:
    """Types that optimizers, state_dict, copies and pickles meet."""
    model = net()
    train(model, rank)
    weight = model.blocks[0].up.weight
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    back = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
    copied = copy.deepcopy(weight)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with torch.no_grad():
        model(batch(rank))
    evaluated = {type(parameter) for parameter in model.parameters()}
    return {
        "evaluated": evaluated,
        "types": {(type(value), type(value.to_local())) for value in model.state_dict().values()},
        "parameters": {type(parameter) for parameter in model.parameters()},
        "loaded": {(type(value), type(value.to_local())) for value in back.values()},
        "attributes": vars(back["blocks.0.up.weight"].to_local()),
        "copied": bool((copied.full_tensor() == weight.full_tensor()).all()),
        "norm": float(norm.full_tensor() if isinstance(norm, DTensor) else norm),
    }


def gathered_classes(rank: int) -> list:
    """Classes of the weights that a block's layers read."""
    model, seen = net("rowwise"), []
    model.blocks[1].register_forward_pre_hook(
        lambda block, _: seen.append((type(block.up.weight), block.up.weight.data))
    )
    model(batch(rank))
    ((kind, codes),) = seen
    return [kind is GatheredWeight, str(codes.dtype)]


def outside_of_the_root(rank: int) -> dict:
    """A block called alone, and weights unsharded by hand, after a step that has changed the weights: no old scale."""
    found = {}
    for what in ("block", "unshard", "evaluation"):
        model = net()
        train(model, rank, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(64.0)  # beyond every scale that was joined before
        if what == "unshard":
            model.blocks[0].unshard()
        with torch.no_grad():
            call = model if what == "evaluation" else model.blocks[0]
            y = call(batch(rank))
        plain = net(shard=False)
        whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
        plain.load_state_dict(whole)
        with torch.no_grad():
            wanted = (plain if what == "evaluation" else plain.blocks[0])(batch(rank))
        found[what] = torch.equal(y, wanted)
    return found


def replaced_tensors(rank: int) -> dict:
    """New local tensors, from `load_state_dict(assign=True)` and from the meta device, are gathered as codes too."""
    model = net()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with Traffic() as traffic:
        first = model(batch(rank))
    with torch.device("meta"):
        empty = Net(*SIZE)
    fe.convert(empty, "current", skip=lambda name, module: False)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    fe.distributed.fsdp(empty, mesh=mesh)
    empty.to_empty(device="cpu")
    empty.load_state_dict(state)
    with Traffic() as other:
        second = empty(batch(rank))
    kinds = {dtype for kind, dtype in [*traffic.bytes, *other.bytes] if kind == "all-gather"}
    return {"equal": torch.equal(first, second), "gathered": kinds}


def reports(rank: int) -> dict:
    """What fe.inspect says of our gather, of fully_shard's own, and of a shared weight."""
    ours = net()
    theirs = net(shard=False)
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    tied: Any = Net(*SIZE)
    tied.blocks[1].up.weight = tied.blocks[0].up.weight
    fe.convert(tied, "current", overrides={"last": "bf16"}, skip=lambda name, module: False)
    fe.distributed.fsdp(tied, blocks=[tied.blocks[2]])
    for model in (ours, theirs, tied):
        model(batch(rank))
    read = {name: fe.inspect(model) for name, model in (("ours", ours), ("theirs", theirs), ("tied", tied))}
    gathers = {name: {row["name"]: row["gather"] for row in report.layers} for name, report in read.items()}
    return {
        "sums": {name: report.totals["gather"] for name, report in read.items()},
        "gathers": gathers,
        "text": {name: report.table() for name, report in read.items()},
    }


def counted(rank: int) -> dict:
    """The slots of a weight, under our gather and under fully_shard's."""
    found = {}
    for what in ("ours", "theirs"):
        model = net("delayed", shard=what == "ours")
        if what == "theirs":
            fully_shard(model)
            fe.distributed.reduce_amax(model)
        train(model, rank, 3)
        slots = fe.scaling_state(model)
        found[what] = {
            name: [float(slots[f"{name}.weight"].amax), float(slots[f"{name}.weight"].scale)]
            + [int(getattr(slots[f"{name}.weight"], key)) for key in ("calls", "elements", "nonfinite")]
            for name in ("blocks.0.up", "last")
        }
    return found


def sharded_by_others(rank: int) -> dict:
    """A model that fully_shard was called on, gathered in FP8 afterwards; parameters that are left out."""
    ours, theirs = net("rowwise"), net("rowwise", shard=False)
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    fe.distributed.gather_fp8(theirs)
    found: dict[str, Any] = {"equal": torch.equal(ours(batch(rank)), theirs(batch(rank)))}
    found["weights"] = (fe.inspect(theirs).totals["gather"] or {})["as_codes"]
    ignoring = net(shard=False)
    several = {ignoring.last.weight, ignoring.last.bias, ignoring.blocks[0].norm.weight}  # sets differ in order
    fe.distributed.fsdp(ignoring, ignored_params=several)
    found["ignored"] = (fe.inspect(ignoring).totals["gather"] or {})["weights"]
    for what, model in (("twice", theirs), ("plain", net(shard=False)), ("not converted", Net(*SIZE))):
        try:
            fe.distributed.gather_fp8(model)
        except fe.errors.ParallelError as error:
            found[what] = str(error)
    return found


class Mixture(nn.Module):
    """Two experts' matrices in one parameter beside a layer of two dimensions."""

    def __init__(self, experts: int = 4):
        super().__init__()
        self.up, self.experts = nn.Linear(32, 32), fe.GroupedLinear(experts, 32, 32, recipe="current")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [2, 3, 3] if self.experts.shape[0] == 3 else [2, 2, 2, 2]
        return self.experts(self.up(x), sizes)


def of_experts(rank: int) -> dict:
    """What is said of experts, which are gathered in high precision; and where nothing of them is."""
    found: dict[str, Any] = {}

    def made() -> Any:
        return fe.convert(nn.Sequential(Mixture(), Mixture()), "current")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fe.errors.ParallelWarning)
        model = fe.distributed.fsdp(made(), blocks=[])
    found["said"] = [str(each.message) for each in caught if "experts" in str(each.message)]
    model(torch.ones(8, 32)).sum().backward()
    report = fe.inspect(model)
    found["gathers"] = {row["name"]: row["gather"] for row in report.layers}
    found["text"] = report.table()
    for what in ("fsdp", "gather_fp8"):
        model = made()
        if what == "gather_fp8":
            fully_shard(model)
        try:
            getattr(fe.distributed, what)(model, strict=True)
        except fe.errors.StrictError as error:
            found[what] = str(error)
        found[f"{what} left"] = {type(parameter) is DTensor for parameter in model.parameters()}
    model = made()
    ignored = {model[0].experts.weight, model[1].experts.weight}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fe.errors.ParallelWarning)
        fe.distributed.fsdp(model, strict=True, blocks=[model[0], model[1]], ignored_params=ignored)
        fe.distributed.fsdp(fe.convert(nn.Sequential(nn.Linear(32, 32)), "current"), strict=True, blocks=[])
    found["unsaid"] = [str(each.message) for each in caught if "experts" in str(each.message)]
    return found


def never_codes(rank: int) -> dict[str, bool]:
    """Weights that codes cannot stand for, whose shards are no equal numbers of rows: the gather is fully_shard's."""
    options: dict[str, dict] = {
        "experts that ranks do not divide": {},
        "another dimension": {"shard_placement_fn": lambda parameter: Shard(1) if parameter.dim() == 2 else None},
    }
    found = {}
    for what, given in options.items():
        results = []
        for shard in (fully_shard, fe.distributed.fsdp):
            torch.manual_seed(0)
            model = fe.convert(Mixture(3), "current")
            shard(model, **given)
            y = model(batch(rank)[:, :32])
            y.square().mean().backward()
            parameters: list[Any] = list(model.parameters())
            results.append([y, *(parameter.grad.full_tensor() for parameter in parameters)])
        found[what] = all(map(torch.equal, *results))
    return found


def work(rank: int, ranks: int) -> dict:
    """Everything above, on one rank."""
    warnings.simplefilter("ignore")
    parts = (
        plain_parameters,
        gathered_classes,
        outside_of_the_root,
        replaced_tensors,
        reports,
        counted,
        sharded_by_others,
        of_experts,
        never_codes,
    )
    return {part.__name__: part(rank) for part in parts}


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run(work, 2, fresh=True)


@pytest.mark.slow
def test_parameters_are_ordinary(found: list[dict]):
    for rank in found:
        mine = rank["plain_parameters"]
        assert mine["types"] == mine["loaded"] == {(DTensor, torch.Tensor)}
        assert mine["parameters"] == mine["evaluated"] == {DTensor}
        assert mine["attributes"] == {}
        assert mine["copied"]
    assert found[0]["plain_parameters"]["norm"] == found[1]["plain_parameters"]["norm"]


@pytest.mark.slow
def test_layers_read_codes(found: list[dict]):
    assert found[0]["gathered_classes"] == [True, "torch.float8_e4m3fn"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["block", "unshard", "evaluation"])
def test_a_gather_outside_of_the_roots_forward_has_scales_of_now(what: str, found: list[dict]):
    assert all(rank["outside_of_the_root"][what] for rank in found)


@pytest.mark.slow
def test_new_local_tensors_are_gathered_as_codes(found: list[dict]):
    assert found[0]["replaced_tensors"] == {"equal": True, "gathered": {"uint8"}}


@pytest.mark.slow
def test_the_report_says_how_each_weight_is_gathered(found: list[dict]):
    gathers, sums, text = (found[0]["reports"][key] for key in ("gathers", "sums", "text"))
    assert set(gathers["ours"].values()) == {"FP8 codes"}
    # 3 blocks of two weights and the last: padded rows of a rank times columns.
    rows = {name: -(-size // 2) for name, size in (("up", 65), ("down", 33), ("last", 33))}
    codes = 3 * (rows["up"] * 33 + rows["down"] * 65) + rows["last"] * 33
    assert sums["ours"] == {
        "weights": 7, "as_codes": 7, "sent_bytes": codes, "high_precision_bytes": 4 * codes, "as_codes_bytes": codes
    }  # fmt: skip
    assert (sums["theirs"]["sent_bytes"], sums["theirs"]["as_codes_bytes"]) == (4 * codes, codes)
    assert f"fe.distributed.fsdp would send {codes / 1e6:.2f} MB" in text["theirs"]
    assert gathers["tied"]["blocks.0.up"] == "high precision: other modules read the same weight"
    assert gathers["tied"]["last"] == "high precision: its forward reads the weight in BF16"
    assert gathers["tied"]["blocks.2.down"] == "FP8 codes"
    assert "other modules read the same weight" in text["tied"]


@pytest.mark.slow
def test_what_others_have_sharded_is_gathered_in_fp8(found: list[dict]):
    for rank in found:
        mine = rank["sharded_by_others"]
        assert (mine["equal"], mine["weights"], mine["ignored"]) == (True, 7, 6)
        assert "is gathered in FP8 already: call it, or fsdp, once" in mine["twice"]
        assert "fully_shard was called on no part of Net" in mine["plain"]
        assert "Net has no converted layers; call fe.convert first" in mine["not converted"]


@pytest.mark.slow
def test_experts_in_high_precision_are_said_once_and_an_error_under_strict(found: list[dict]):
    named = "0.experts and 1 more"
    why = "it holds the weights of several experts, which fe.distributed.ExpertParallel divides instead"
    told = [each["of_experts"] for each in found]
    for mine in told:
        assert {name for name, how in mine["gathers"].items() if how == f"high precision: {why}"} == {
            "0.experts", "1.experts"
        }  # fmt: skip
        assert f"2 gathered in high precision ({named}): {why}" in mine["text"]
        for what in ("fsdp", "gather_fp8"):
            assert mine[what].startswith(f"strict=True: fe.distributed.{what}: 2 weights ({named}) would be gathered")
        assert mine["fsdp left"] == {False}, "the model is as it was"
        assert mine["unsaid"] == []
    assert len(told[0]["said"]) == 1
    assert f"2 weights ({named}) are gathered in high precision: {why}" in told[0]["said"][0]
    assert told[1]["said"] == [], "the first rank says it"


@pytest.mark.slow
def test_weights_that_are_never_codes_are_gathered_as_by_fully_shard(found: list[dict]):
    for rank in found:
        assert rank["never_codes"] == {"experts that ranks do not divide": True, "another dimension": True}


@pytest.mark.slow
def test_slots_of_weights_hold_the_same_numbers(found: list[dict]):
    for rank in found:
        assert rank["counted"]["ours"] == rank["counted"]["theirs"]
