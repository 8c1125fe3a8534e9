"""AdamW with states in FP8 and in 8 bits, by other libraries, beside converted layers.

torchao's, and bitsandbytes' where it is installed (on one process; it compiles nothing).  torchao compiles the step of
each size of parameter, which takes it half a minute a model: here its step runs in eager code, but for the one test
that compares the two.
"""

import importlib
import importlib.util
import io
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_models as tiny
import torch
from support import converted, same
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.errors import StateError
from fp8engine.numerics.recipe import RECIPES

OPTIMIZERS = {"AdamWFp8": "torchao.optim", "AdamW8bit": "torchao.optim"}
EVERY = {**OPTIMIZERS, **({"bitsandbytes": "bitsandbytes.optim"} if importlib.util.find_spec("bitsandbytes") else {})}
RATE, SAVED, STEPS = 1e-3, 3, 6
SHARDED_RECIPES, SHARDED_WAYS = ("rowwise", "auto"), ("DCP", "fe.distributed")

# E4M3 rounds a first moment by 2^-4 of it at most, and the root of a second one by 2^-5: an update changes by less than
# 2^-3, and to first order so would the loss's fall, were all roundings of 2e5 elements aligned.  They are independent:
# a few thousandths are left.  An eighth of the bound has room for what FP8 layers round otherwise from then on.
OF_THE_FALL = 2.0**-6

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # DCP's, on one process
every_optimizer = pytest.mark.parametrize("name", EVERY)


def optimizer_of(name: str, parameters: Any) -> Any:
    if name == "AdamW":
        return torch.optim.AdamW(parameters, RATE)
    return getattr(importlib.import_module(EVERY[name]), name.replace("bitsandbytes", "AdamW8bit"))(parameters, lr=RATE)


@pytest.fixture(autouse=True)
def eager_steps():
    with torch.compiler.set_stance("force_eager"):
        yield


def build(recipe: str, name: str, sharded: bool = False) -> tuple[Any, Any]:
    """A converted llama and its optimizer, from the same weights every time."""
    torch.manual_seed(0)
    model = tiny.llama_of_blocks().to(torch.bfloat16 if recipe == "fp32" else torch.float32)
    converted(model, recipe)
    if sharded:
        fe.distributed.fsdp(model)
    return model, optimizer_of(name, model.parameters())


def batch(step: int) -> torch.Tensor:
    """Words at even distances; all of the vocabulary are there."""
    make = torch.Generator().manual_seed(step)
    start, stride = torch.randint(0, 64, (4, 1), generator=make), 2 * torch.randint(0, 4, (4, 1), generator=make) + 1
    return ((start + stride * torch.arange(64)) % 64).view(8, 32)


def train(model: Any, optimizer: Any, steps: range, batch: Callable = batch) -> list[float]:
    losses = []
    for step in steps:
        loss = tiny.loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parts_of(x: Any) -> list[torch.Tensor]:
    if hasattr(x, "__tensor_flatten__"):
        return [part for name in x.__tensor_flatten__()[0] for part in parts_of(getattr(x, name))]
    return [x] if isinstance(x, torch.Tensor) else []


def states(optimizer: Any) -> list[torch.Tensor]:
    """Copies of everything that an optimizer keeps of its parameters, codes as bytes."""
    parts = [part.clone() for state in optimizer.state.values() for x in state.values() for part in parts_of(x)]
    return [part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts]


def everything(model: Any, optimizer: Any) -> list[torch.Tensor]:
    return [part.detach().clone() for p in model.parameters() for part in parts_of(p)] + states(optimizer)


def worst(found: list[float], wanted: list[float]) -> float:
    """The largest distance of two runs' losses, as a share of what the loss fell by."""
    return max(abs(x - y) for x, y in zip(found, wanted, strict=True)) / (wanted[0] - min(wanted))


@pytest.mark.few(9)
@every_optimizer
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_those_of_adamw(recipe: str, name: str):
    found, wanted = (train(*build(recipe, each), range(STEPS)) for each in (name, "AdamW"))
    assert wanted[-1] < wanted[0] - 0.2
    assert 0 < worst(found, wanted) < OF_THE_FALL


@every_optimizer
def test_states_take_a_quarter_of_their_bytes(name: str):
    """A byte an element, and a scale in FP32 for 256 of them; what is small stays in FP32."""
    sizes = {}
    for each in (name, "AdamW"):
        model, optimizer = build("current", each)
        train(model, optimizer, range(1))
        sizes[each] = sum(x.nbytes for x in states(optimizer))
    counts = [p.numel() for p in model.parameters()]
    large = sum(count for count in counts if count >= 4096)
    assert large > 0.99 * sum(counts)
    # a step count each, which bitsandbytes keeps as a number, and the 256 values of the 8-bit codes of a state
    fixed = len(counts) * 4 + 2 * 1024 * sum(count >= 4096 for count in counts)
    assert 0 <= sizes[name] - 2 * (large * (1 + 4 / 256) + 4 * (sum(counts) - large)) <= fixed
    assert sizes["AdamW"] == 8 * sum(counts) + 4 * len(counts)


def torch_save(folder: Path, model: Any, optimizer: Any) -> Callable[[Any, Any], None]:
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), fe.scaling_state_dict(model)), file)

    def load(model: Any, optimizer: Any) -> None:
        file.seek(0)
        weights, moments, scaling = torch.load(file, weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        fe.load_scaling_state_dict(model, scaling)

    return load


def dcp(folder: Path, model: Any, optimizer: Any) -> Callable[[Any, Any], None]:
    """torch.distributed.checkpoint by itself; the scaling state, which is this rank's own, beside it."""

    def both(model: Any, optimizer: Any) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    checkpoint.save(both(model, optimizer), checkpoint_id=folder)
    scaling = fe.scaling_state_dict(model)

    def load(model: Any, optimizer: Any) -> None:
        found = both(model, optimizer)
        checkpoint.load(found, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        fe.load_scaling_state_dict(model, scaling)

    return load


def ours(folder: Path, model: Any, optimizer: Any) -> Callable[[Any, Any], None]:
    fe.distributed.save(folder, model=model, optimizer=optimizer, scaling=fe.scaling_state(model))
    return lambda model, optimizer: fe.distributed.load(
        folder, model=model, optimizer=optimizer, scaling=fe.scaling_state(model)
    )


WAYS = {"torch.save": torch_save, "DCP": dcp, "fe.distributed": ours}


@pytest.mark.few(5)
@every_optimizer
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["delayed", "auto"])
def test_a_resumed_run_is_the_run_that_went_on(recipe: str, way: str, name: str, tmp_path: Path):
    model, optimizer = build(recipe, name)
    train(model, optimizer, range(SAVED))
    load = WAYS[way](tmp_path / "saved", model, optimizer)
    resumed = build(recipe, name)
    load(*resumed)
    assert same(everything(*resumed), everything(model, optimizer))
    assert train(*resumed, range(SAVED, STEPS)) == train(model, optimizer, range(SAVED, STEPS))
    assert same(everything(*resumed), everything(model, optimizer))


@every_optimizer
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, fe.amp.GradScaler], ids=["torch", "fe.amp"])
def test_a_step_that_overflows_in_fp16_leaves_states_as_they_are(scaler: Any, name: str):
    model, optimizer = build("current", name)
    scaler = scaler("cpu", init_scale=2.0**14)
    for step in range(3):
        with torch.autocast("cpu", torch.float16):
            loss = tiny.loss_of(model, batch(step))
        scaler.scale(loss).backward()
        if overflows := step == 1:
            next(model.parameters()).grad.view(-1)[0] = torch.inf
        before = everything(model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert same(before, everything(model, optimizer)) == overflows
    assert scaler.get_scale() == 2.0**13


@every_optimizer
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_only_adapters_have_states(name: str):
    runs = {}
    for each in (name, "AdamW"):
        model, _ = build("current", "AdamW")
        config = peft.LoraConfig(r=32, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
        adapted: Any = peft.get_peft_model(model, config)
        frozen = [p.clone() for p in adapted.parameters() if not p.requires_grad]
        optimizer = optimizer_of(each, adapted.parameters())
        runs[each] = train(adapted, optimizer, range(STEPS), lambda _: batch(0))
        assert all((p in optimizer.state) == ("lora_" in n) for n, p in adapted.named_parameters())
        assert same(frozen, [p for p in adapted.parameters() if not p.requires_grad])
    assert 0 < worst(runs[name], runs["AdamW"]) < OF_THE_FALL


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_step_is_the_eager_one_and_kept_copies_of_weights_follow_it(name: str):
    losses = []
    for stance in ("force_eager", "default"):
        torch.manual_seed(0)
        layer = fe.Linear(64, 64, bias=False, recipe=replace(fe.current(), cache_weights=True))
        optimizer, x = optimizer_of(name, layer.parameters()), torch.randn(32, 64)
        losses.append([])
        for _ in range(STEPS):
            loss = (layer(x) - x).square().mean()
            loss.backward()
            with torch.compiler.set_stance(stance):
                optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0][0] - losses[0][-1] > 0.02
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)  # FP32 in another order moves a code here and there


def on_ranks(rank: int, ranks: int, folder: str) -> dict:
    """Losses under FSDP2, of the run that went on and of resumed ones, and whether these end equal."""
    warnings.simplefilter("ignore")
    torch.compiler.set_stance("force_eager")
    mine = lambda step: batch(step).chunk(ranks)[rank]  # noqa: E731
    found = {}
    for recipe, name in [(recipe, name) for recipe in SHARDED_RECIPES for name in ("AdamW", *OPTIMIZERS)]:
        model, optimizer = build(recipe, name, sharded=True)
        losses = train(model, optimizer, range(SAVED), mine)
        ways = SHARDED_WAYS if name in OPTIMIZERS else ()
        loads = {way: WAYS[way](Path(folder, recipe, name, way), model, optimizer) for way in ways}
        losses += train(model, optimizer, range(SAVED, STEPS), mine)
        resumed = {}
        for way, load in loads.items():
            again = build(recipe, name, sharded=True)
            load(*again)
            equal = train(*again, range(SAVED, STEPS), mine) == losses[SAVED:]
            resumed[way] = equal and same(everything(*again), everything(model, optimizer))
        found[recipe, name] = losses, resumed, sum(x.nbytes for x in states(optimizer))
    model, optimizer = cut(sharded=True)
    fe.distributed.save(Path(folder, "cut"), model=model, optimizer=optimizer)
    return found


def cut(sharded: bool) -> tuple[Any, Any]:
    """A trained layer whose 272 rows of 48 are 51 blocks of 256; each of two ranks has 25 and a half."""
    torch.manual_seed(0)
    model = converted(nn.Sequential(nn.Linear(48, 272)), "rowwise", skip=lambda name, module: False)
    if sharded:
        fe.distributed.fsdp(model, blocks=[])
    optimizer = optimizer_of("AdamWFp8", model.parameters())
    model(torch.ones(16, 48)).square().mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """The folder of the checkpoints, and what each rank has found."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run(on_ranks, 2, str(folder))


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("recipe", SHARDED_RECIPES)
def test_sharded_states_train_as_adamw_and_resume_bit_for_bit(recipe: str, name: str, ranked: tuple[Path, list[dict]]):
    for rank in ranked[1]:
        losses, resumed, size = rank[recipe, name]
        wanted, _, whole = rank[recipe, "AdamW"]
        assert 0 < worst(losses, wanted) < OF_THE_FALL
        assert resumed == dict.fromkeys(SHARDED_WAYS, True)
        assert size < 0.3 * whole  # the 256 values of 8-bit codes weigh more on a half


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_two_ranks_saved_goes_on_on_one_process(name: str, ranked: tuple[Path, list[dict]]):
    folder, ranks = ranked
    model, optimizer = build("rowwise", name)
    path = folder / "rowwise" / name / "fe.distributed"
    fe.distributed.load(path, model=model, optimizer=optimizer, scaling=fe.scaling_state(model))
    both = [sum(losses) / 2 for losses in zip(*(rank["rowwise", name][0] for rank in ranks), strict=True)]
    found = train(model, optimizer, range(SAVED, STEPS))
    # Rows have the scales of one process; only sums over ranks are in another order, until a state's code is rounded to
    # its neighbour for it.
    assert found[0] == pytest.approx(both[SAVED], rel=1e-5)
    assert worst([*both[:SAVED], *found], both) < OF_THE_FALL


@pytest.mark.slow
def test_states_whose_blocks_ranks_have_cut_are_refused_elsewhere(ranked: tuple[Path, list[dict]]):
    model, optimizer = cut(sharded=False)
    before = everything(model, optimizer)
    with pytest.raises(StateError, match=r"block boundary.*8-bit states: on as many ranks"):
        fe.distributed.load(ranked[0] / "cut", model=model, optimizer=optimizer)
    assert same(before, everything(model, optimizer))
