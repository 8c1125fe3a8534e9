"""Checkpoints whose ranks see different disks: an error on every rank at once; and what each rank's state becomes."""

import builtins
import io
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Number, refusal, says
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


def refused(action: Callable[[], object]) -> tuple[str, bool]:
    """What the action is refused with, and whether that came at once."""
    start = time.monotonic()
    return refusal(action), time.monotonic() - start < AT_ONCE


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


def disks(rank: int, ranks: int, folder: str) -> dict:
    """What each rank is told where rank 1's disk is another, and whether that is what is wanted."""
    warnings.simplefilter("ignore")
    a, b, own = Path(folder, "a"), Path(folder, "b"), Path(folder, "a" if rank == 0 else "missing")
    for path, value in ((a, 1), (b, 5)):
        fe.distributed.save(path, **parts(value))
    into = parts(0)
    save, load = fe.distributed.save, fe.distributed.load
    reading = {
        r"no whole checkpoint of this model \(on ranks \[1\]\): FileNotFoundError": lambda: load(own, **into),
        "True on rank 0 of the group and False on rank 1": lambda: fe.distributed.has_checkpoint(own),
        r"\(on ranks \[1\]\): PermissionError: \[Errno 13\] Permission denied": lambda: without_rights(
            "rb", ".metadata", lambda: load(a, **into)
        ),
        r"PermissionError: \[Errno 13\] Permission denied": lambda: without_rights(
            "rb", ".distcp", lambda: load(a, **into)
        ),
        "ranks differ in 1 things; what is found there is": lambda: load((a, b)[rank], **into),
    }
    writing = {
        "was not saved, and what was there is unchanged": lambda: without_rights(
            "wb", ".distcp", lambda: save(a, **parts(2))
        ),
        r"\(on ranks \[0\]\): FileNotFoundError": lambda: save("/proc/fp8engine/a", **parts(2)),
    }
    found: dict[str, Any] = {wanted: refused(call) for wanted, call in reading.items()}
    unchanged = float(into["model"].weight.detach().sum()) == 0 and into["number"].value == rank
    found |= {wanted: refused(call) for wanted, call in writing.items()}
    load(a, **into)
    loaded = float(into["model"].weight.detach().mean()), into["number"].value
    return {"told": found, "unchanged": unchanged, "loaded": loaded}


@pytest.mark.slow
def test_every_rank_is_told_at_once_what_one_of_them_cannot_do(tmp_path: Path):
    for found in run(disks, 2, str(tmp_path), limit=60.0):
        for wanted, (told, at_once) in found["told"].items():
            assert says(told, f"StateError: .*{wanted}"), told
            assert at_once, wanted
        assert found["unchanged"]
        assert found["loaded"] == (1.0, 1)  # the first rank's number, on every rank


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


def raw(rank: int, ranks: int, folder: str) -> dict:
    """Runs that went on, and that were resumed by torch.distributed.checkpoint alone.

    before: bytes that rank 0 writes first; the next tensors, of rank 0 and 1 alike, are then written by rank 1.
    """
    found = {}
    for recipe, before in (("delayed", 0), ("delayed", 10**6), ("current", 10**6)):
        seed, path = 10 + 100 * rank, f"{folder}/{recipe}{before}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
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
        found[recipe, before] = same, [(each.category, str(each.message)) for each in said]
    return found


def raw_auto(rank: int, ranks: int, folder: str) -> dict:
    """What torch.distributed.checkpoint alone says of `auto`, whose tables have the sizes of the step; then `load`."""
    warnings.simplefilter("ignore")
    seed = 10 + 100 * rank
    model, resumed = (trained("auto", seed, resumed=each) for each in (False, True))
    before = fe.scaling_state_dict(resumed)
    checkpoint.save({"scaling": fe.scaling_state_dict(model)}, checkpoint_id=f"{folder}/raw")
    fe.distributed.save(f"{folder}/whole", model=model, scaling=fe.scaling_state(model))
    with pytest.raises(checkpoint.api.CheckpointException) as wrong:
        checkpoint.load({"scaling": fe.scaling_state_dict(resumed)}, checkpoint_id=f"{folder}/raw")
    told = str(wrong.value)
    unchanged = str(before) == str(fe.scaling_state_dict(resumed))
    fe.distributed.load(f"{folder}/whole", model=resumed, scaling=fe.scaling_state(resumed))
    same = all(torch.equal(train(model, seed + step), train(resumed, seed + step)) for step in (5, 6))
    return {"told": told, "unchanged": unchanged, "same": same}


@pytest.mark.slow
def test_a_raw_load_under_auto_is_an_error_on_every_rank_and_load_is_bitwise(tmp_path: Path):
    for found in run(raw_auto, 2, str(tmp_path), limit=60.0):
        assert "Size mismatch between saved" in found["told"]
        assert "scaling.auto" in found["told"]
        assert (found["unchanged"], found["same"]) == (True, True)


@pytest.mark.slow
def test_a_state_that_torch_keeps_of_one_of_several_ranks_is_bitwise_or_says_why_not(tmp_path: Path):
    first, second = run(raw, 2, str(tmp_path))
    for found in (first, second):
        assert found["delayed", 0] == (True, [])
        assert found["current", 10**6] == (True, [])
    same, said = first["delayed", 10**6]
    assert not same
    ((category, text),) = said
    assert category is ParallelWarning
    assert "amaxes of other ranks than the first in 6 slots, 0.input the first" in text
    assert "fe.distributed.save" in text
    assert second["delayed", 10**6] == (False, [])


def emulated(rank: int, ranks: int) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fe.convert(nn.Sequential(nn.Linear(16, 16)), "current")
    return [str(each.message) for each in said if each.category is EmulationWarning]


@pytest.mark.slow
def test_the_first_rank_alone_says_that_fp8_is_emulated():
    first, second = run(emulated, 2)
    assert len(first) == 1
    assert "1 layers compute with FP8 values, emulated" in first[0]
    assert second == []
