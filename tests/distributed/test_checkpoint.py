"""Checkpoints of sharded models: bit for bit on as many ranks, on others as near as their sums, and for torch."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import refusal
from support import converted
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fp8engine as fe
from benchmarks.distributed.fsdp import Net
from benchmarks.distributed.processes import run

RECIPES = ("current", "delayed", "rowwise", "auto")
SIZE, BATCH, SAVED, STEPS = (33, 65), 16, 3, 6


class Trained:
    """A sharded model, its optimizer, and what both go on with."""

    def __init__(self, recipe: str, size: tuple[int, int] = SIZE):
        torch.manual_seed(1)
        self.model: Any = fe.convert(Net(*size), recipe, skip=lambda name, module: False)
        fe.distributed.fsdp(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "scaling": fe.scaling_state(self.model)}

    def train(self, first: int, last: int, rank: int, ranks: int) -> list[float]:
        """The loss over all ranks of each step."""
        losses = []
        for step in range(first, last):
            make = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH, SIZE[0], generator=make) * (1 + step % 3)
            mine = x.chunk(ranks)[rank]
            loss = (self.model(mine) - 1).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            losses.append(whole.item() / ranks)
        return losses

    def everything(self) -> list[torch.Tensor]:
        """This rank's parameters, optimizer state and scaling state."""
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        tables = self.model.blocks[0].up.numerics.state
        local = [getattr(x, "to_local", lambda x=x: x)() for x in [*self.model.parameters(), *state]]
        return [x.detach().clone() for x in [*local, tables.live_2S, tables.history_HS, tables.counts_CS]]


def save(rank: int, ranks: int, folder: str) -> dict:
    """Losses after the save, of a run that goes on; and of one that was never saved."""
    warnings.simplefilter("ignore")
    found = {}
    for recipe in RECIPES:
        runs = []
        for saves in (True, False):
            trained = Trained(recipe)
            trained.train(0, SAVED, rank, ranks)
            if saves:
                fe.distributed.save(f"{folder}/{recipe}", **trained.parts)
            runs.append(trained.train(SAVED, STEPS, rank, ranks))
        found[recipe] = runs
    return found


def load(rank: int, ranks: int, folder: str) -> dict:
    """Losses of runs that go on from the checkpoints."""
    warnings.simplefilter("ignore")
    found = {}
    for recipe in RECIPES:
        trained = Trained(recipe)
        fe.distributed.load(f"{folder}/{recipe}", **trained.parts)
        found[recipe] = trained.train(SAVED, STEPS, rank, ranks)
    return found


def spoilt(rank: int, ranks: int, folder: str) -> dict:
    """What bad checkpoints say, and whether anything has changed."""
    warnings.simplefilter("ignore")
    trained = Trained("delayed")
    trained.train(0, 1, rank, ranks)
    before = trained.everything()
    found = {}
    for name in ("cut", "without metadata", "nothing", "another recipe", "another size"):
        if name == "another size":
            trained, path = Trained("delayed", (33, 64)), f"{folder}/delayed"
            trained.optimizer.zero_grad()
            trained.model(torch.randn(2, 33)).sum().backward()
            trained.optimizer.step()
            before = trained.everything()
        else:
            path = f"{folder}/rowwise" if name == "another recipe" else f"{folder}/{name}"
        told = refusal(lambda: fe.distributed.load(path, **trained.parts))  # noqa: B023 - called at once
        found[name] = told, all(map(torch.equal, before, trained.everything()))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict:
    return run(save, 2, str(folder))[0]


@pytest.mark.slow
def test_a_save_changes_nothing(saved: dict):
    """Amaxes are joined at the save as they would have been at the next step."""
    for recipe in ("current", "delayed", "rowwise"):
        assert saved[recipe][0] == saved[recipe][1]


@pytest.mark.slow
def test_as_many_ranks_go_on_bit_for_bit(saved: dict, folder: Path):
    assert run(load, 2, str(folder))[0] == {recipe: losses for recipe, (losses, _) in saved.items()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_other_numbers_of_ranks(saved: dict, folder: Path, ranks: int):
    """Scales per row do not depend on how tokens are divided: FP32 sums in another order remain, 2^-23 a sum of loss.

    A scale per tensor is of 4 to 16 rows: FP8's own rounding, 2^-4 an element, moves the loss by under 1 %.
    """
    found = run(load, ranks, str(folder))[0]
    for recipe, losses in found.items():
        wanted = torch.tensor(saved[recipe][0])
        apart = ((torch.tensor(losses) - wanted).abs() / wanted).max()
        assert apart < (1e-6 if recipe == "rowwise" else 1e-2), recipe


@pytest.mark.slow
def test_torch_reads_it_into_the_plain_model(saved: dict, folder: Path):
    path = folder / "plain.pt"
    dcp_to_torch_save(folder / "rowwise", path)
    plain = Net(*SIZE)
    weights = torch.load(path, weights_only=True)["model"]
    assert plain.load_state_dict(weights).missing_keys == []
    assert {type(value) for value in weights.values()} == {torch.Tensor}


@pytest.mark.slow
def test_a_bad_checkpoint_changes_nothing(saved: dict, folder: Path):
    for name in ("cut", "without metadata"):
        shutil.copytree(folder / "delayed", folder / name)
    part = max((folder / "cut").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    (folder / "without metadata" / ".metadata").unlink()
    for rank in run(spoilt, 2, str(folder)):
        for name, (told, same) in rank.items():
            assert same, name
            assert told.startswith("StateError: "), name
            assert ("no whole checkpoint of this model" in told) == (name != "another recipe"), told
        assert "blocks.0.up.weight is [65, 33], wanted is [64, 33]" in rank["another size"][0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_masters_and_a_loss_scale_are_given_as_parts(level: str, tmp_path: Path):
    """torch's names for an optimizer's state have no place for them; the error says how, and that goes on exactly."""

    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16))
        return fe.amp.decorate(model, torch.optim.AdamW(model.parameters(), 0.1), level)

    def parts(optimizer: Any) -> dict[str, Any]:
        return {"optimizer": optimizer.inner, "scaler": optimizer.scaler} if level == "O1" else {"masters": optimizer}

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        optimizer.backward((model(torch.ones(4, 16)) - 1).square().mean())
        optimizer.step()

    (model, optimizer), (again, stepping) = made(), made()
    step(model, optimizer)
    optimizer.scaler.update(1024.0)
    told = "inner, scaler=optimizer.scaler" if level == "O1" else "masters=optimizer"
    for refused in (fe.distributed.save, fe.distributed.load):
        with pytest.raises(fe.errors.StateError, match=told):
            refused(tmp_path / "one", model, optimizer)
    fe.distributed.save(tmp_path / "one", model, **parts(optimizer))
    fe.distributed.load(tmp_path / "one", again, **parts(stepping))
    assert stepping.scaler.get_scale() == 1024.0
    step(model, optimizer)
    step(again, stepping)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_one_process_without_a_group(tmp_path: Path):
    """A plain model trained on one device writes what a sharded one reads."""

    def made() -> dict:
        model = fe.convert(nn.Sequential(nn.Linear(16, 16)), "delayed")
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = made(), made()
        x = torch.randn(4, 16)
        first["model"](x).sum().backward()
        first["optimizer"].step()
        for parts in (first, second):
            parts["scaling"] = fe.scaling_state(parts["model"])
        for _ in range(2):  # the second replaces the first
            fe.distributed.save(tmp_path / "one", **first)
        fe.distributed.load(tmp_path / "one", **second)
    assert torch.equal(first["model"](x), second["model"](x))
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert second["optimizer"].state_dict()["state"][0]["momentum_buffer"].abs().sum() > 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_gradients_that_are_there_hide_no_optimizer_state(tmp_path: Path):
    """Of an optimizer without state torch finds no names where gradients are; they are the user's, and stay."""

    def made(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = converted(nn.Sequential(nn.Linear(8, 8)), "current")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(steps + 1):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            if step < steps:
                optimizer.step()
        return model, optimizer

    for steps in (2, 0):
        (model, optimizer), (again, loaded) = made(steps), made(0)
        fe.distributed.save(tmp_path / f"{steps}", model, optimizer)
        before = [p.grad for p in again.parameters()]
        fe.distributed.load(tmp_path / f"{steps}", again, loaded)
        assert all(p.grad is grad is not None for p, grad in zip(again.parameters(), before, strict=True))
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(p, q)
            assert optimizer.state[p].keys() == loaded.state[q].keys()
            assert all(torch.equal(x, loaded.state[q][key]) for key, x in optimizer.state[p].items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_save_between_microbatches_ends_no_step(optimizer, sharded: bool, group, tmp_path: Path):
    """Torch steps an optimizer without state to find its names (SGD never has one); auto decides as without a save."""

    def decided(saves: bool) -> tuple[list[int], list[float]]:
        torch.manual_seed(0)
        model = converted(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8)), "auto")
        if sharded:
            fe.distributed.fsdp(model, blocks=list(model))
        stepping, losses = optimizer(model.parameters(), 1e-2), []
        for microbatch in range(9):
            loss = model(torch.randn(8, 32, generator=torch.Generator().manual_seed(microbatch))).square().mean()
            loss.backward()
            losses.append(loss.item())
            if saves:
                fe.distributed.save(tmp_path / "one", model, stepping)
            if microbatch % 3 == 2:
                stepping.step()
                stepping.zero_grad(set_to_none=False)
        return [line["step"] for line in fe.inspect(model).decisions], losses

    steps, losses = decided(False)
    assert set(steps) == {3}
    assert decided(True) == (steps, losses)
