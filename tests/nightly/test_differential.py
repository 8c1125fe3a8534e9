"""Differential fuzzer of matmuls: each of random models' is what quantising and multiplying by hand gives.

Calls are watched from outside: a forward hook takes a layer's x, weight and y, a hook of its autograd node dy, dx, dw
and db.  No tensor of the model is replaced, so codes travel as they do without.  The histories of delayed scaling are
kept by the oracle, from the tensors that it saw; `auto`'s recipe is read after it has decided, casts are made by hand.
A linear layer is checked as the layer of one expert.

    pytest tests/nightly --seeds 500        `make nightly`
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from by_hand import Window, differs, restored
from random_models import RECIPES, Model, batch, loss_of
from torch import nn

import fp8engine as fe
from fp8engine.nn.linear import float8_modules

# torch says it of its RMSNorm, of an input that autocast has made.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")


@dataclass
class Watch:
    """What the layers of a model computed, held against the oracle."""

    windows: dict[tuple[str, str], Window] = field(default_factory=lambda: defaultdict(Window))
    backward_seen: bool = False
    recipes: dict[str, fe.Recipe] = field(default_factory=dict)
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    step: str = ""

    def begins(self) -> None:
        """The model's forward begins, and a step with it if a backward has come since; none with an evaluation."""
        if self.backward_seen and torch.is_grad_enabled():
            self.backward_seen = False
            for (name, _), window in self.windows.items():
                window.turn(self.recipes[name].window)

    def called(self, name: str, layer: Any, given: tuple, y: torch.Tensor) -> None:
        """A layer's forward: its result now, its gradients when they come.  given: x, and of experts their rows."""
        recipe = self.recipes[name] = layer.numerics.recipe
        like, *divided = given
        x = like.detach().clone().flatten(0, -2)
        weight = layer.weight.detach().clone()
        weight = weight.t() if layer.transposed else weight
        weight = weight if weight.dim() == 3 else weight[None]
        for role in ("input", "weight", "grad_output"):
            self.windows[name, role].follow(getattr(recipe, role), recipe.margin)
        sizes = divided[0] if divided else [len(x)]
        use = _Use(name, recipe, x, weight, sizes, like.dtype, layer.numerics.standalone)
        record = torch.is_grad_enabled() or _in_backward()
        bias = None if layer.bias is None else layer.bias.detach().view(len(sizes), -1)
        if bias is not None and not recipe.is_fp8:
            bias = bias.to(recipe.input.dtype)
        rounds = self.rounds(recipe.forward[0], y.dtype)
        rows, weights = self.rows(use, "input", x, recipe.forward[0]), self.weights(use, recipe.forward[1])
        for e, found in enumerate(y.detach().flatten(0, -2).split(sizes)):
            self.compare(f"{name} y", found, rows[e], weights[e], None if bias is None else bias[e], rounds)
        if record:
            self.see(use, "input", x)
            self.see(use, "weight", weight)
        if y.grad_fn is not None and "Linear" in y.grad_fn.name():
            y.grad_fn.register_hook(lambda into, of: self.went_back(use, into, of))

    def rows(self, use: _Use, role: str, tensor: torch.Tensor, cast: fe.Cast) -> list[torch.Tensor]:
        """What the engine's matmul should read of each expert's rows; groups of a scale do not cross experts."""
        if cast.is_fp8 and cast.per_tensor:
            return list(self.operand(use, role, tensor, cast).split(use.sizes))
        return [self.operand(use, role, part, cast) for part in tensor.split(use.sizes)]

    def weights(self, use: _Use, cast: fe.Cast) -> list[torch.Tensor]:
        """The same of each expert's weight."""
        if cast.is_fp8 and cast.per_tensor:
            whole = self.operand(use, "weight", use.weight.flatten(0, 1), cast)
            return list(whole.view(use.weight.shape))
        return [self.operand(use, "weight", part, cast) for part in use.weight]

    def operand(self, use: _Use, role: str, tensor: torch.Tensor, cast: fe.Cast) -> torch.Tensor:
        """A matrix under a cast: under the scale that the operand has in this call."""
        window = None
        if cast.delayed:
            # As it is now: a backward may come when another step has begun.
            kept = self.windows[use.name, role]
            window = use.scales.setdefault(role, replace(kept, steps=kept.steps.copy()))
            while len(window.steps) > use.recipe.window:
                window.steps.popleft()
        elif not use.recipe.is_fp8:
            tensor = tensor.to(cast.dtype)
        return restored(tensor, cast, window, use.recipe.margin)

    def see(self, use: _Use, role: str, tensor: torch.Tensor) -> None:
        """A step's history has that operand."""
        if torch.isfinite(tensor).all():
            self.windows[use.name, role].see(float(tensor.float().abs().amax()))

    def went_back(self, use: _Use, into: tuple, of: tuple) -> None:
        """A layer's backward: its three gradients."""
        self.backward_seen |= not use.alone
        recipe, name, (dx, dw, db, *_) = use.recipe, use.name, (*into, None)  # a bias that is not there has no place
        dy = of[0].detach().flatten(0, -2)
        if dx is not None:
            rows, weights = self.rows(use, "grad_output", dy, recipe.dgrad[0]), self.weights(use, recipe.dgrad[1])
            rounds = self.rounds(recipe.dgrad[0], use.dtype)
            for found, a, b in zip(dx.flatten(0, -2).split(use.sizes), rows, weights, strict=True):
                self.compare(f"{name} dx", found, a, b.t(), None, rounds)
        if dw is not None:
            first = self.rows(use, "grad_output", dy, recipe.wgrad[0])
            second = self.rows(use, "input", use.x, recipe.wgrad[1])
            rounds = self.rounds(recipe.wgrad[0], use.weight.dtype)
            for found, a, b in zip(dw.view(use.weight.shape), first, second, strict=True):
                self.compare(f"{name} dw", found, a.t(), b.t(), None, rounds)
        if db is not None:
            for found, rows in zip(db.view(len(use.sizes), -1), dy.split(use.sizes), strict=True):
                ones = torch.ones(1, len(rows), dtype=torch.float64)
                self.compare(f"{name} db", found[None], ones, rows.double().t(), None, (db.dtype,))
        if dx is not None or dw is not None:  # else nothing has cast it
            self.see(use, "grad_output", dy)

    def rounds(self, cast: fe.Cast, out: torch.dtype) -> tuple:
        """The dtypes to which a result is rounded: a matmul in 16 bits rounds before the bias and before `out`."""
        return (out,) if cast.is_fp8 else (cast.dtype, cast.dtype, out)

    def compare(self, what: str, found: torch.Tensor, a, b, bias, rounds: tuple) -> None:
        """Note a matmul that is further from the oracle than its roundings are."""
        self.checked += 1
        error = differs(found, a, b, bias, rounds)
        if not error <= 1:
            self.wrong.append(f"{self.step}: {what} {tuple(found.shape)} is {error:.3g} times its bound away")


@dataclass
class _Use:
    """One call of a layer, and the windows under which it began."""

    name: str
    recipe: fe.Recipe
    x: torch.Tensor  # [M, K]
    weight: torch.Tensor  # [E, N, K]; a linear layer's is one expert's
    sizes: list[int]  # rows of each expert
    dtype: torch.dtype
    alone: bool  # made by hand: its steps are not the model's
    scales: dict[str, Window] = field(default_factory=dict)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def watched(model: nn.Module) -> Watch:
    """Hooks on every converted layer of a model."""
    watch = Watch()
    model.register_forward_pre_hook(lambda *_: watch.begins())
    for name, layer in model.named_modules():
        if layer in float8_modules(model):
            layer.register_forward_hook(
                lambda layer, given, y, name=name: watch.called(name, layer, given, y), always_call=False
            )
    return watch


def run(seed: int) -> Watch:
    """A random model under a random recipe through a random program of steps."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, (name, make) = Model(draw), draw.choice(sorted(RECIPES.items()))
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    recipe, overrides = make(), {}
    if draw.random() < 0.5:
        recipe = replace(recipe, output=fe.FP32)  # no rounding to BF16: one code that is wrong is seen
    if draw.random() < 0.3:
        overrides["blocks.0.*"] = draw.choice([fe.rowwise(), fe.current(), "bf16", fe.delayed(history=2)])
    if name == "rowwise_gw_hp" or overrides.get("blocks.0.*") == "bf16":
        for block in model.blocks:  # what is kept in 16 bits is changed by such a write, as nn.Linear's input is
            vars(block)["between"] = "another"
    model.to(dtype)
    if draw.random() < 0.3:
        for parameter in random.Random(seed).sample(list(model.parameters()), 2):
            parameter.requires_grad = False
    fe.convert(model, recipe, overrides=overrides, fuse=draw.random() < 0.7, skip=lambda name, module: False)
    watch = watched(model)
    autocast = dtype == torch.float32 and draw.random() < 0.4
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(6):
        watch.step = f"seed {seed}, {name}, {dtype}, step {step}"
        what = draw.choice(["train", "train", "train", "accumulate", "evaluate", "write", "write data"])
        x = batch(model, draw, dtype)
        if what == "evaluate":
            with torch.no_grad(), context:
                model(x)
            continue
        if what.startswith("write"):
            with torch.no_grad():
                weight = draw.choice(list(model.parameters()))
                (weight.data if what == "write data" else weight).mul_(1.5)
        x.requires_grad = draw.random() < 0.7 or True in model.checkpoints
        for _ in range(2 if what == "accumulate" else 1):
            with context:
                loss = loss_of(model(x), draw)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return watch


@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning", "ignore::fp8engine.errors.FusionWarning")
@pytest.mark.parametrize("part", range(4))
def test_every_matmul_is_what_quantising_by_hand_gives(part: int, pytestconfig: pytest.Config):
    seeds: Any = pytestconfig.getoption("--seeds")
    checked, wrong = 0, []
    for seed in range(part, seeds, 4):
        watch = run(seed)
        checked, wrong = checked + watch.checked, [*wrong, *watch.wrong]
    assert not wrong, "\n".join(wrong[:20])
    assert checked > 40 * (seeds // 4)
