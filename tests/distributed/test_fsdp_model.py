"""A model under fe.distributed.fsdp, as other code sees it: parameters, state_dict, single blocks, reports."""

import copy
import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import gradients, holds_on_every_rank, named, whole, work
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

import fp8engine as fe
from benchmarks.distributed.fsdp import Net
from benchmarks.distributed.processes import run
from fp8engine.autograd.gathered import GatheredWeight
from fp8engine.distributed.traffic import Traffic
from fp8engine.report.state import controllers_of

SIZE = (33, 65)  # uneven on two ranks


def net(recipe: Any = "current", shard: bool = True) -> Any:
    torch.manual_seed(0)
    model = Net(*SIZE)
    fe.convert(model, recipe, skip=lambda name, module: False)
    return fe.distributed.fsdp(model) if shard else model


def fully_sharded(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(8, SIZE[0], generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, rank: int, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def parameters_are_ordinary(rank: int) -> None:
    """For optimizers, state_dict, copies and pickles."""
    model = net()
    train(model, rank)
    weight = model.blocks[0].up.weight
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    back = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
    for state in (model.state_dict(), back):
        assert {(type(value), type(value.to_local())) for value in state.values()} == {(DTensor, torch.Tensor)}
    assert vars(back["blocks.0.up.weight"].to_local()) == {}
    assert torch.equal(copy.deepcopy(weight).full_tensor(), weight.full_tensor())
    norm = whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    norms = [torch.empty_like(norm) for _ in range(2)]
    dist.all_gather(norms, norm)
    assert norms[0] == norms[1]
    for _ in range(2):  # after a step, and after an evaluation
        assert {type(parameter) for parameter in model.parameters()} == {DTensor}
        with torch.no_grad():
            model(batch(rank))


def layers_read_codes(rank: int) -> None:
    model, seen = net("rowwise"), []
    model.blocks[1].register_forward_pre_hook(
        lambda block, _: seen.append((type(block.up.weight), block.up.weight.data.dtype))
    )
    model(batch(rank))
    assert seen == [(GatheredWeight, torch.float8_e4m3fn)]


def a_gather_outside_of_the_roots_forward_has_scales_of_now(rank: int) -> None:
    """A block called alone, and weights unsharded by hand, after a step that has changed the weights."""
    for what in ("block", "unshard", "evaluation"):
        model = net()
        train(model, rank, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(64.0)  # beyond every scale that was joined before
        if what == "unshard":
            model.blocks[0].unshard()
        with torch.no_grad():
            y = (model if what == "evaluation" else model.blocks[0])(batch(rank))
        plain = net(shard=False)
        plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
        with torch.no_grad():
            wanted = (plain if what == "evaluation" else plain.blocks[0])(batch(rank))
        assert torch.equal(y, wanted), what


def a_registered_method_is_a_forward(rank: int) -> None:
    """As TRL registers `generate`: it runs no hooks, and gathers, samples and decides as a forward does."""
    for recipe in ("delayed", fe.auto(interval=2)):
        found = []
        for registered in (False, True):
            model = net(recipe)
            model.score = model.forward
            register_fsdp_forward_method(model, "score")
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            losses, joined = [], []
            for step in range(8):
                with Traffic() as traffic:
                    loss = (model.score if registered else model)(batch(rank, step)).square().mean()
                    loss.backward()
                losses.append(loss.item())
                joined.append(step and dict(traffic.calls))  # no step ends where a first forward begins
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            log = [(change.step, change.layer) for each in controllers_of(model) for change in each.log]
            found.append((losses, joined, log))
        assert found[0] == found[1]
        assert recipe == "delayed" or found[0][2]


def new_local_tensors_are_gathered_as_codes(rank: int) -> None:
    """From `load_state_dict(assign=True)` and from the meta device."""
    model = net()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with torch.device("meta"):
        empty = Net(*SIZE)
    fe.convert(empty, "current", skip=lambda name, module: False)
    fe.distributed.fsdp(empty, mesh=dist.init_device_mesh("cpu", (2,)))
    empty.to_empty(device="cpu")
    empty.load_state_dict(state)
    results = []
    for each in (model, empty):
        with Traffic() as traffic:
            results.append(each(batch(rank)))
        assert {dtype for kind, dtype in traffic.bytes if kind == "all-gather"} == {"uint8"}
    assert torch.equal(*results)


def the_report_says_how_each_weight_is_gathered(rank: int) -> None:
    """Of our gather, of fully_shard's own, and of a shared weight."""
    ours = net()
    theirs = fully_sharded(net(shard=False))
    tied: Any = Net(*SIZE)
    tied.blocks[1].up.weight = tied.blocks[0].up.weight
    fe.convert(tied, "current", overrides={"last": "bf16"}, skip=lambda name, module: False)
    fe.distributed.fsdp(tied, blocks=[tied.blocks[2]])
    reports = []
    for model in (ours, theirs, tied):
        model(batch(rank))
        reports.append(fe.inspect(model))
    assert {row["gather"] for row in reports[0].layers} == {"FP8 codes"}
    # 3 blocks of two weights and the last: padded rows of a rank times columns.
    rows = {name: -(-size // 2) for name, size in (("up", 65), ("down", 33), ("last", 33))}
    codes = 3 * (rows["up"] * 33 + rows["down"] * 65) + rows["last"] * 33
    assert reports[0].totals["gather"] == {
        "weights": 7, "as_codes": 7, "sent_bytes": codes, "high_precision_bytes": 4 * codes, "as_codes_bytes": codes
    }  # fmt: skip
    sums = reports[1].totals["gather"] or {}
    assert (sums["sent_bytes"], sums["as_codes_bytes"]) == (4 * codes, codes)
    assert f"fe.distributed.fsdp would send {codes / 1e6:.2f} MB" in reports[1].table()
    gathers = {row["name"]: row["gather"] for row in reports[2].layers}
    assert gathers["blocks.0.up"] == "high precision: other modules read the same weight"
    assert gathers["last"] == "high precision: its forward reads the weight in BF16"
    assert gathers["blocks.2.down"] == "FP8 codes"
    assert "other modules read the same weight" in reports[2].table()


def slots_of_weights_hold_the_same_numbers(rank: int) -> None:
    """Under our gather and under fully_shard's."""
    slots, theirs = [], fully_sharded(net("delayed", shard=False))
    fe.distributed.reduce_amax(theirs)
    for model in (net("delayed"), theirs):
        train(model, rank, 3)
        slots.append([fe.scaling_state(model)[f"{name}.weight"] for name in ("blocks.0.up", "last")])
    for mine, theirs in zip(*slots, strict=True):
        for key in ("amax", "scale", "calls", "elements", "nonfinite"):
            assert getattr(mine, key).item() == getattr(theirs, key).item(), key


def what_others_have_sharded_is_gathered_in_fp8(rank: int) -> None:
    """And parameters that are left out are not."""
    ours, theirs = net("rowwise"), fully_sharded(net("rowwise", shard=False))
    fe.distributed.gather_fp8(theirs)
    assert torch.equal(ours(batch(rank)), theirs(batch(rank)))
    assert (fe.inspect(theirs).totals["gather"] or {})["as_codes"] == 7
    blocks = net("rowwise", shard=False)  # whose root keeps its own weights whole
    for block in blocks.blocks:
        fully_shard(block)
    assert torch.equal(ours(batch(rank)), fe.distributed.gather_fp8(blocks)(batch(rank)))
    assert (fe.inspect(blocks).totals["gather"] or {})["as_codes"] == 6
    ignoring = net(shard=False)
    several = {ignoring.last.weight, ignoring.last.bias, ignoring.blocks[0].norm.weight}  # sets differ in order
    fe.distributed.fsdp(ignoring, ignored_params=several)
    assert (fe.inspect(ignoring).totals["gather"] or {})["weights"] == 6
    for model, told in (
        (theirs, "is gathered in FP8 already: call it, or fsdp, once"),
        (net(shard=False), "fully_shard was called on no part of Net"),
        (Net(*SIZE), "Net has no converted layers; call fe.convert first"),
    ):
        with pytest.raises(fe.errors.ParallelError, match=told):
            fe.distributed.gather_fp8(model)


class Mixture(nn.Module):
    """Two experts' matrices in one parameter beside a layer of two dimensions."""

    def __init__(self, experts: int = 4):
        super().__init__()
        self.up, self.experts = nn.Linear(32, 32), fe.GroupedLinear(experts, 32, 32, recipe="current")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [2, 3, 3] if self.experts.shape[0] == 3 else [2, 2, 2, 2]
        return self.experts(self.up(x), sizes)


def experts_in_high_precision_are_said_once_and_an_error_under_strict(rank: int) -> None:
    """Where all of them are left out, nothing is said."""
    named = "(0.experts and 1 more)"
    why = "it holds the weights of several experts, which fe.distributed.ExpertParallel divides instead"

    def made() -> Any:
        return fe.convert(nn.Sequential(Mixture(), Mixture()), "current")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fe.errors.ParallelWarning)
        model = fe.distributed.fsdp(made(), blocks=[])
    said = [str(each.message) for each in caught if "experts" in str(each.message)]
    assert len(said) == (rank == 0), "the first rank says it"
    assert all(f"2 weights {named} are gathered in high precision: {why}" in each for each in said)
    model(torch.ones(8, 32)).sum().backward()
    report = fe.inspect(model)
    high = {row["name"] for row in report.layers if row["gather"] == f"high precision: {why}"}
    assert high == {"0.experts", "1.experts"}
    assert f"2 gathered in high precision {named}: {why}" in report.table()
    for what, model in (("fsdp", made()), ("gather_fp8", fully_shard(made()))):
        with pytest.raises(
            fe.errors.StrictError, match=r"2 weights \(0.experts and 1 more\) would be gathered"
        ) as told:
            getattr(fe.distributed, what)(model, strict=True)
        assert str(told.value).startswith(f"strict=True: fe.distributed.{what}: ")
        assert {type(parameter) is DTensor for parameter in model.parameters()} == {what == "gather_fp8"}, "as it was"
    model = made()
    ignored = {model[0].experts.weight, model[1].experts.weight}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fe.errors.ParallelWarning)
        fe.distributed.fsdp(model, strict=True, blocks=[model[0], model[1]], ignored_params=ignored)
        fe.distributed.fsdp(fe.convert(nn.Sequential(nn.Linear(32, 32)), "current"), strict=True, blocks=[])
    assert [str(each.message) for each in caught if "experts" in str(each.message)] == []


def weights_that_are_never_codes_are_gathered_as_by_fully_shard(rank: int) -> None:
    """Codes cannot stand for them, and their shards are no equal numbers of rows."""
    options: dict[str, dict] = {
        "experts that ranks do not divide": {},
        "another dimension": {"shard_placement_fn": lambda parameter: Shard(1) if parameter.dim() == 2 else None},
    }
    for what, given in options.items():
        results = []
        for shard in (fully_shard, fe.distributed.fsdp):
            torch.manual_seed(0)
            model = fe.convert(Mixture(3), "current")
            shard(model, **given)
            y = model(batch(rank)[:, :32])
            y.square().mean().backward()
            results.append([y, *gradients(model).values()])
        assert all(map(torch.equal, *results)), what


PARTS = named(
    parameters_are_ordinary,
    layers_read_codes,
    a_gather_outside_of_the_roots_forward_has_scales_of_now,
    a_registered_method_is_a_forward,
    new_local_tensors_are_gathered_as_codes,
    the_report_says_how_each_weight_is_gathered,
    slots_of_weights_hold_the_same_numbers,
    what_others_have_sharded_is_gathered_in_fp8,
    experts_in_high_precision_are_said_once_and_an_error_under_strict,
    weights_that_are_never_codes_are_gathered_as_by_fully_shard,
)


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return run(work, 2, PARTS, fresh=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_on_every_rank(part: str, found: list[dict[str, str]]):
    holds_on_every_rank(part, found)
