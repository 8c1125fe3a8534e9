"""Differential fuzzer of matmuls: each of random models' is what quantising and multiplying by hand gives.

Calls are watched from outside: a forward hook takes a layer's x, weight and y, a hook of its autograd node dy, dx, dw
and db.  No tensor of the model is replaced, so codes travel as they do without.  The histories of delayed scaling are
kept by the oracle, from the tensors that it saw; `auto`'s recipe is read after it has decided, casts are made by hand.

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
from random_models import Model, batch, loss_of
from torch import nn

import fp8engine as fe
from fp8engine.nn.linear import float8_modules

CHOICES = {
    "current": fe.current,
    "delayed": lambda: fe.delayed(history=3, margin=1),
    "most recent": lambda: fe.delayed(history=4, algo="most_recent"),
    "rowwise": fe.rowwise,
    "rowwise_exact": lambda: fe.rowwise(power_of_2=False),
    "rowwise_gw_hp": fe.rowwise_gw_hp,
    "blockwise": lambda: fe.blockwise(16),
    "blockwise_exact": lambda: fe.blockwise(16, power_of_2=False),
    "auto": lambda: fe.auto(interval=2),
    "auto for speed": lambda: fe.auto(interval=2, objective="speed"),
}


@dataclass
class Watch:
    """What the layers of a model computed, held against the oracle."""

    windows: dict[tuple[str, str], Window] = field(default_factory=lambda: defaultdict(Window))
    backward_seen: bool = False
    recomputed: bool = False
    recipes: dict[str, fe.Recipe] = field(default_factory=dict)
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    step: str = ""

    def begins(self) -> None:
        """The model's forward begins, and a step with it, if a backward has come since.

        With an evaluation none does; but for one behind a step with a checkpoint: a layer that a reentrant one calls
        without gradients cannot tell the two.
        """
        if self.backward_seen and (torch.is_grad_enabled() or self.recomputed):
            self.backward_seen = self.recomputed = False
            for (name, _), window in self.windows.items():
                window.turn(self.recipes[name].window)

    def called(self, name: str, layer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        """A layer's forward: its result now, its gradients when they come."""
        numerics, weight = layer.numerics, layer.weight.detach().clone()
        recipe = self.recipes[name] = numerics.recipe
        x_MK, out = x.detach().clone().flatten(0, -2), y.dtype
        for role in ("input", "weight", "grad_output"):
            self.windows[name, role].follow(getattr(recipe, role), recipe.margin)
        use = _Use(name, recipe, x_MK, weight, x.dtype, {})
        record = torch.is_grad_enabled() or _in_backward()
        self.recomputed |= _in_backward()
        a, b = (
            self.operand(use, "input", x_MK, recipe.forward[0]),
            self.operand(use, "weight", weight, recipe.forward[1]),
        )
        bias = None if layer.bias is None else layer.bias.detach()
        if bias is not None and not recipe.is_fp8:
            bias = bias.to(recipe.input.dtype)
        self.compare(f"{name} y", y.detach().flatten(0, -2), a, b, bias, self.rounds(recipe.forward[0], out))
        if record:
            for role, tensor in (("input", x_MK), ("weight", weight)):
                if torch.isfinite(tensor).all():
                    self.windows[name, role].see(float(tensor.float().abs().amax()))
        if y.grad_fn is not None and "Linear" in y.grad_fn.name():
            has_bias = layer.bias is not None
            y.grad_fn.register_hook(lambda into, of: self.went_back(use, into, of, has_bias))

    def operand(self, use: _Use, role: str, tensor: torch.Tensor, cast: fe.Cast) -> torch.Tensor:
        """What the engine's matmul should read: under the scale that the operand has in this call."""
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

    def went_back(self, use: _Use, into: tuple, of: tuple, has_bias: bool) -> None:
        """A layer's backward: its three gradients."""
        self.backward_seen = True
        recipe, (dx, dw, db, *_) = use.recipe, into
        dy = of[0].detach().flatten(0, -2)
        if dx is not None:
            a, b = (
                self.operand(use, "grad_output", dy, recipe.dgrad[0]),
                self.operand(use, "weight", use.weight, recipe.dgrad[1]),
            )
            self.compare(f"{use.name} dx", dx.flatten(0, -2), a, b.t(), None, self.rounds(recipe.dgrad[0], use.dtype))
        if dw is not None:
            a, b = (
                self.operand(use, "grad_output", dy, recipe.wgrad[0]),
                self.operand(use, "input", use.x, recipe.wgrad[1]),
            )
            self.compare(f"{use.name} dw", dw, a.t(), b.t(), None, self.rounds(recipe.wgrad[0], use.weight.dtype))
        if db is not None:
            ones = torch.ones(1, len(dy), dtype=torch.float64)
            self.compare(f"{use.name} db", db[None], ones, dy.double().t(), None, (db.dtype,))
        if (dx is not None or dw is not None) and torch.isfinite(dy).all():  # else nothing has cast it
            self.windows[use.name, "grad_output"].see(float(dy.float().abs().amax()))

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
    x: torch.Tensor
    weight: torch.Tensor
    dtype: torch.dtype
    scales: dict[str, Window]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def watched(model: nn.Module) -> Watch:
    """Hooks on every converted layer of a model."""
    watch = Watch()
    model.register_forward_pre_hook(lambda *_: watch.begins())
    for name, layer in model.named_modules():
        if layer in float8_modules(model):
            layer.register_forward_hook(
                lambda layer, given, y, name=name: watch.called(name, layer, given[0], y), always_call=False
            )
    return watch


def run(seed: int) -> Watch:
    """A random model under a random recipe through a random program of steps."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, (name, make) = Model(draw), draw.choice(sorted(CHOICES.items()))
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
