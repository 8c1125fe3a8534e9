"""Checkpoints whose ranks see different disks: an error on every rank at once; and what each rank's state becomes."""

import builtins
import io
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Number, holds_on_every_rank, named, refusal, says, work
from torch import nn
from torch.distributed import checkpoint

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.errors import EmulationWarning, ParallelWarning

AT_ONCE = 5.0  # seconds


def parts(value: int) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return {"model": model, "number": Number(value + dist.get_rank())}


def without_rights(mode: str, name: str, action: Callable[[], object]) -> None:
    """The action, in which rank 1 cannot open files of that name in that mode."""
    real = io.open

    def opened(file: Any, how: str = "r", *args: Any, **named: Any) -> Any:
        if dist.get_rank() == 1 and how == mode and str(file).endswith(name):
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, how, *args, **named)

    io.open = builtins.open = opened
    try:
        action()
    finally:
        io.open = builtins.open = real


def every_rank_is_told_at_once_what_one_of_them_cannot_do(rank: int, folder: str) -> None:
    """Where rank 1's disk is another; and nothing has changed."""

    def refused(wanted: str, call: Callable[[], object]) -> None:
        start = time.monotonic()
        told = refusal(call)
        assert says(told, f"StateError: .*{wanted}"), told
        assert time.monotonic() - start < AT_ONCE

    save, load = fe.distributed.save, fe.distributed.load
    a, b, own = Path(folder, "a"), Path(folder, "b"), Path(folder, "a" if rank == 0 else "missing")
    for path, value in ((a, 1), (b, 5)):
        save(path, **parts(value))
    into, denied = parts(0), r"PermissionError: \[Errno 13\] Permission denied"
    missing = r"no whole checkpoint of this model \(on ranks \[1\]\): FileNotFoundError"
    refused(missing, lambda: load(own, **into))
    refused("True on rank 0 of the group and False on rank 1", lambda: fe.distributed.has_checkpoint(own))
    refused(rf"\(on ranks \[1\]\): {denied}", lambda: without_rights("rb", ".metadata", lambda: load(a, **into)))
    refused(denied, lambda: without_rights("rb", ".distcp", lambda: load(a, **into)))
    refused("ranks differ in 1 things; what is found there is", lambda: load((a, b)[rank], **into))
    assert (float(into["model"].weight.detach().sum()), into["number"].value) == (0, rank)
    unchanged = "was not saved, and what was there is unchanged"
    refused(unchanged, lambda: without_rights("wb", ".distcp", lambda: save(a, **parts(2))))
    refused(r"\(on ranks \[0\]\): FileNotFoundError", lambda: save("/proc/fp8engine/a", **parts(2)))
    load(a, **into)
    assert float(into["model"].weight.detach().mean()) == 1.0
    assert into["number"].value == 1, "the first rank's number, on every rank"


def a_save_or_a_failed_load_before_the_first_step_changes_no_run(rank: int, folder: str) -> None:
    """And what such a save has written goes on as the run that it was of.  Gradients are of ranks that are alike."""

    def of(which: str) -> Any:
        into = parts(1)
        if which == "AdamW":
            return into | {"optimizer": torch.optim.AdamW(into["model"].parameters(), 0.1)}
        return into | {"optimizer": torch.optim.SGD(into["model"].parameters(), 0.1, momentum=0.9, dampening=0.5)}

    def steps(parts: Any) -> list[torch.Tensor]:
        for i in range(3):
            parts["model"](torch.full((2, 3), 1.0 + i)).square().mean().backward()
            parts["optimizer"].step()
            parts["optimizer"].zero_grad()
        return [p.detach() for p in parts["model"].parameters()]

    for which in ("AdamW", "SGD"):
        path, saved, failed, resumed, back = f"{folder}/new {which}", *(of(which) for _ in range(4))
        fe.distributed.save(path, **saved)
        with pytest.raises(fe.errors.StateError, match="no whole checkpoint"):
            fe.distributed.load(f"{folder}/none", **failed)
        steps(back)
        for each in (resumed, back):
            fe.distributed.load(path, **each)
        wanted = steps(of(which))
        assert all(
            torch.equal(a, b)
            for each in (saved, failed, resumed, back)
            for a, b in zip(wanted, steps(each), strict=True)
        )


class Refuses(Number):
    """A part that the second rank cannot load, though it has begun to."""

    def load_state_dict(self, state_dict: dict) -> None:
        before, self.value = self.value, state_dict["value"]
        if dist.get_rank() == 1 and before == 5:
            raise ValueError("not that one")


def a_part_that_one_rank_refuses_leaves_all_parts_as_they_were(rank: int, folder: str) -> None:
    path, seed = f"{folder}/refused", 10 + 100 * rank
    fe.distributed.save(path, trained("delayed", 10), **saved_parts(1))
    model, other = (trained("delayed", seed) for _ in range(2))
    into, before = saved_parts(5), model[0].weight.detach().clone()
    told = refusal(lambda: fe.distributed.load(path, model, **into, scaling=fe.scaling_state(model)))
    assert says(told, "StateError: .*has no scaling"), told
    told = refusal(lambda: fe.distributed.load(path, model, **into))
    assert says(told, r"StateError: .*was not loaded \(on ranks \[1\]\): StateError: part 'b': ValueError: not"), told
    assert (into["a"].value, into["b"].value, torch.equal(before, model[0].weight)) == (5, 5, True)
    path += " with scales"
    fe.distributed.save(path, other, **saved_parts(1), scaling=fe.scaling_state(other))
    told = refusal(lambda: fe.distributed.load(path, model, scaling=fe.scaling_state(model), **into))
    assert says(told, "StateError: .*part 'b'"), told
    # Ranks have amaxes of their own, of which the next step takes the largest: so does that of a run without a load.
    never = trained("delayed", seed)
    assert all(torch.equal(train(never, seed + step), train(model, seed + step)) for step in (5, 6))


def saved_parts(value: int) -> dict[str, Any]:
    return {"a": Number(value), "b": Refuses(value)}


def a_part_that_a_load_could_not_read_is_not_saved(rank: int, folder: str) -> None:
    bad: Any = Number(np.zeros(2))  # type: ignore[arg-type]
    told = refusal(lambda: fe.distributed.save(f"{folder}/bad", nn.Linear(3, 2), good=Number(1), bad=bad))
    assert says(told, r"StateError: .*was not saved.*does not read the state of part 'bad'; .*tensors, numbers"), told
    assert not fe.distributed.has_checkpoint(f"{folder}/bad")


def trained(recipe: str, seed: int, resumed: bool = False) -> Any:
    """A converted model after two steps on batches of that seed, or none; amaxes are joined over ranks at each."""
    torch.manual_seed(0)
    model: Any = fe.convert(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), recipe)
    fe.distributed.reduce_amax(model)
    for step in range(0 if resumed else 2):
        train(model, seed + step)
    return model


def train(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    y = model(x * (1 + seed % 10 % 5))  # the last step before the save has the largest amax, of which scales are made
    y.square().mean().backward()
    return y.detach()


def a_state_that_torch_keeps_of_one_of_several_ranks_is_bitwise_or_says_why_not(rank: int, folder: str) -> None:
    """Runs that went on, and that were resumed by torch.distributed.checkpoint alone.

    before: bytes that rank 0 writes first; the next tensors, of rank 0 and 1 alike, are then written by rank 1.
    """
    for recipe, before in (("delayed", 0), ("delayed", 10**6), ("current", 10**6)):
        seed, path = 10 + 100 * rank, f"{folder}/{recipe}{before}"
        model = trained(recipe, seed)
        more = {"": torch.zeros(before + 1)} if rank == 0 else {}
        checkpoint.save({**more, "scaling": fe.scaling_state_dict(model)}, checkpoint_id=path)
        went_on = [train(model, seed + step) for step in (5, 6)]
        resumed = trained(recipe, seed, resumed=True)
        state = {"scaling": fe.scaling_state_dict(resumed)}
        checkpoint.load(state, checkpoint_id=path)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fe.load_scaling_state_dict(resumed, state["scaling"])
        same = all(torch.equal(y, train(resumed, seed + step)) for y, step in zip(went_on, (5, 6), strict=True))
        of_another = recipe == "delayed" and before > 0
        assert same != of_another
        assert [each.category for each in said] == ([ParallelWarning] if of_another and rank == 0 else [])
        for each in said:
            assert "amaxes of other ranks than the first in 6 slots, 0.input the first" in str(each.message)
            assert "fe.distributed.save" in str(each.message)


def a_raw_load_under_auto_is_an_error_on_every_rank_and_load_is_bitwise(rank: int, folder: str) -> None:
    """auto's tables have the sizes of the step."""
    seed = 10 + 100 * rank
    model, resumed = (trained("auto", seed, resumed=each) for each in (False, True))
    before = str(fe.scaling_state_dict(resumed))
    checkpoint.save({"scaling": fe.scaling_state_dict(model)}, checkpoint_id=f"{folder}/raw")
    fe.distributed.save(f"{folder}/whole", model=model, scaling=fe.scaling_state(model))
    refused = pytest.raises(checkpoint.api.CheckpointException, match=r"Size mismatch between saved.* scaling\.auto")
    with refused:
        checkpoint.load({"scaling": fe.scaling_state_dict(resumed)}, checkpoint_id=f"{folder}/raw")
    assert before == str(fe.scaling_state_dict(resumed))
    fe.distributed.load(f"{folder}/whole", model=resumed, scaling=fe.scaling_state(resumed))
    assert all(torch.equal(train(model, seed + step), train(resumed, seed + step)) for step in (5, 6))


def the_first_rank_alone_says_that_fp8_is_emulated(rank: int, folder: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fe.convert(nn.Sequential(nn.Linear(16, 16)), "current")
    told = [str(each.message) for each in said if each.category is EmulationWarning]
    assert len(told) == (rank == 0)
    assert all("1 layers compute with FP8 values, emulated" in text for text in told)


PARTS = named(
    the_first_rank_alone_says_that_fp8_is_emulated,  # first: it is said once a process
    every_rank_is_told_at_once_what_one_of_them_cannot_do,
    a_save_or_a_failed_load_before_the_first_step_changes_no_run,
    a_part_that_one_rank_refuses_leaves_all_parts_as_they_were,
    a_part_that_a_load_could_not_read_is_not_saved,
    a_state_that_torch_keeps_of_one_of_several_ranks_is_bitwise_or_says_why_not,
    a_raw_load_under_auto_is_an_error_on_every_rank_and_load_is_bitwise,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(work, 2, PARTS, str(tmp_path_factory.mktemp("checkpoints")), limit=120.0)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_on_every_rank(part: str, found: list[dict[str, str]]):
    holds_on_every_rank(part, found)
