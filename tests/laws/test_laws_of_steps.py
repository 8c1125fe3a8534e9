"""Laws of a training step: what must change no bit of losses, gradients, weights, scaling tables and decisions of auto.

Each law holds for every row of scenarios.py under every recipe of trials.py, but for those that the row excludes.
"""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scenarios import Scenario
from support import sqnr
from threads import mixed
from torch import nn
from torch.utils.checkpoint import checkpoint
from trials import COUNTS, ONCE, RECIPES, STEPS, batch, differences, straight, tables, trained, under

import fp8engine as fe
from fp8engine.scaling.operands import Operands, RootForward

every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def cast_alone(self: RootForward, x: torch.Tensor, layer: int, parent: str | None) -> Operands:
    """In place of RootForward.operands: a layer finds nothing that another has cast."""
    found, made = Operands(), vars(x).get("fp8")
    if isinstance(made, Operands):
        found.producer, found.again = made.producer, made.again
    return found


@pytest.mark.short
@pytest.mark.slow
@every_recipe
def test_codes_are_a_cache(recipe: str, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests):
    """Siblings that share a cast compute, record and count what they do where each of them casts for itself."""
    with monkeypatch.context() as patch:
        patch.setattr(RootForward, "operands", cast_alone)
        alone = {row: trained(row.build(RECIPES[recipe])) for row in under("cache", recipe)}
    for row, found in alone.items():
        with subtests.test(row.name):
            assert differences(found, straight(row, recipe), but=ONCE) == []


@pytest.mark.short
@pytest.mark.slow
@every_recipe
def test_fused_is_unfused(recipe: str, subtests: pytest.Subtests):
    """But for the order of FP32 sums in norms and activations, 2^-24, which differ from torch's own.

    A value that falls to the other side of a rounding boundary moves by 2^-3 of itself, which happens in few batches:
    one of three has none.
    """
    for row in under("fused", recipe):
        if row.converts:
            with subtests.test(row.name):
                assert max(_likeness(row, recipe, step) for step in range(3)) > 60


def _likeness(row: Scenario, recipe: str, step: int) -> float:
    """The smallest SQNR of a first step's gradients, in dB."""
    fused, apart = (trained(row.build(RECIPES[recipe], fuse), [step]) for fuse in (None, False))
    assert differences(fused, apart, but=("loss", "gradient", "weight", "history", "amax", *ONCE)) == []
    given = [name for name, value in apart.items() if name.startswith("gradient") and value is not None]
    return min(sqnr(apart[name], fused[name]) for name in given)


def around(model: Any, reentrant: bool = False) -> Callable:
    return lambda *given: checkpoint(model, *given, use_reentrant=reentrant)


def parts(model: Any, reentrant: bool = False) -> Any:
    """The model, each of whose modules is recomputed by itself."""
    for part in model.children():
        part.forward = around(part.forward, reentrant)
    return model


RECOMPUTED: dict[str, Callable] = {
    "plain": lambda model: model,
    "whole": around,
    "whole, reentrant": lambda model: around(model, True),
    "parts": parts,
    "parts, reentrant": lambda model: parts(model, True),
    "whole and parts": lambda model: around(parts(model)),
}


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(8)
@every_recipe
@pytest.mark.parametrize("recomputed", [each for each in RECOMPUTED if each != "plain"])
def test_a_checkpoint_changes_nothing(recomputed: str, recipe: str, subtests: pytest.Subtests):
    for row in under(f"checkpoint of {recomputed}", recipe):
        with subtests.test(row.name):
            model = row.build(RECIPES[recipe])
            found = trained(model, call=RECOMPUTED[recomputed](model))
            assert differences(found, straight(row, recipe)) == []


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(8)
@every_recipe
@pytest.mark.parametrize(("stop", "call"), [(1, "plain"), (2, "whole, reentrant"), (3, "plain")])
def test_a_resumed_run_is_the_uninterrupted_one(stop: int, call: str, recipe: str, subtests: pytest.Subtests):
    """Under a reentrant checkpoint too, where nothing but the saved state says that a step begins."""
    for row in under(f"checkpoint of {call}", recipe):
        with subtests.test(row.name):
            first, second = (row.build(RECIPES[recipe]) for _ in range(2))
            trained(first, range(stop), RECOMPUTED[call](first))
            file = io.BytesIO()
            torch.save((first.state_dict(), fe.scaling_state_dict(first)), file)
            file.seek(0)
            weights, scaling = torch.load(file, weights_only=True)
            second.load_state_dict(weights)
            fe.load_scaling_state_dict(second, scaling)
            found = trained(second, range(stop, STEPS), RECOMPUTED[call](second))
            wanted = straight(row, recipe)
            assert differences(found, {name: wanted[name] for name in found}) == []


def evaluate(model: nn.Module, x: torch.Tensor, how: str) -> None:
    model.train(how != "eval")
    with torch.inference_mode() if how == "inference_mode" else torch.no_grad():
        model(x)
    model.train()


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(8)
@every_recipe
@pytest.mark.parametrize("how", ["no_grad", "eval", "inference_mode"])
def test_an_evaluation_between_steps_changes_nothing(how: str, recipe: str, subtests: pytest.Subtests):
    """But the counts of what was cast.  Of large values too: a scale that follows them would show."""
    for row in under("evaluation", recipe):
        with subtests.test(row.name):
            model: Any = row.build(RECIPES[recipe])

            def after_two_evaluations(x, model=model):
                state, before = torch.get_rng_state(), tables(model)
                evaluate(model, x.detach() * 1000, how)
                evaluate(model, x.detach(), how)
                assert differences(tables(model), before, but=COUNTS) == []
                torch.set_rng_state(state)
                return model(x)

            found = trained(model, call=after_two_evaluations)
            assert differences(found, straight(row, recipe), but=COUNTS) == []


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "torch.save": saved}


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(8)
@every_recipe
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_trains_as_the_original_and_apart_from_it(how: str, recipe: str, subtests: pytest.Subtests):
    for row in under("copy", recipe):
        with subtests.test(row.name):
            model = row.build(RECIPES[recipe])
            trained(model, range(2))
            other, before = COPIES[how](model), tables(model)
            wanted = straight(row, recipe)
            found = trained(other, range(2, STEPS))
            assert differences(found, {name: wanted[name] for name in found}) == []
            assert differences(tables(model), before) == [], "the copy writes to its own tables"
            found = trained(model, range(2, STEPS))
            assert differences(found, {name: wanted[name] for name in found}) == []


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "auto"])  # it decides when gradients are taken
def test_microbatches_give_the_sum_of_their_gradients(recipe: str, subtests: pytest.Subtests):
    """Each is recorded as a step of its own, whether the optimizer waits for the next one or not."""
    for row in under("accumulation", recipe):
        with subtests.test(row.name):
            together = row.build(RECIPES[recipe])
            trained(together, range(2))
            apart, sums = copy.deepcopy(together), {}
            for step in (2, 3, 2):
                for model in (together, apart):
                    torch.manual_seed(step)
                    model(batch(step)).float().square().mean().backward()
                for name, p in apart.named_parameters():
                    sums[name] = p.grad if name not in sums or p.grad is None else sums[name] + p.grad
                    p.grad = None
            found = {name: p.grad for name, p in together.named_parameters()}
            assert differences(found | tables(together), sums | tables(apart)) == []


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(2)
@every_recipe
def test_threads_do_not_mix_their_requests(recipe: str, subtests: pytest.Subtests):
    for row in under("threads", recipe):
        with subtests.test(row.name):
            model = row.build(RECIPES[recipe])
            trained(model, range(2))
            model.eval()
            assert mixed(model, [batch(step).detach() for step in range(4)], calls=20) == 0
