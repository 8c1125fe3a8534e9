"""The scaling state of a model: one table, a column ("slot") for each operand of each layer and for its result.

The result's is used only where the layer stores it in FP8 (output_slots.py).

    history [H, S]  amax of the last H steps, newest first          live [2, S]   this step's amax; the factor s
    counts  [7, S]  calls, elements, sampled, saturated, ...        rules [3, S]  MAX / 2^margin, window, power of two

One table means one update a step for the whole model, one tensor to reduce across ranks, one thing to save.
The update runs by itself, when the first forward of the next step begins: from the root's forward, or from a layer's
where the root is passed by (a wrapper that calls `model.forward`).  It never runs inside a backward pass, so a layer
recomputed by activation checkpointing sees the scales of its first forward.  Without gradients nothing is recorded.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fp8engine import _torch
from fp8engine.errors import StateError
from fp8engine.numerics.recipe import OUTPUT, ROLES, Cast, Recipe
from fp8engine.ops.card_trials import step_begins
from fp8engine.ops.reference.operand import COUNTERS
from fp8engine.ops.reference.scale import FP32_MAX
from fp8engine.ops.scale_update import GRAD_OUTPUT, SLOTS, GradientCasts, scale_update
from fp8engine.scaling.columns import Column, Slots, apart
from fp8engine.scaling.operands import RootForward, siblings
from fp8engine.scaling.output_slots import OutputSlots
from fp8engine.scaling.sample import StepSamples
from fp8engine.scaling.slot_view import SlotView
from fp8engine.scaling.whole_graph import begin_between, begins_between, end_between

NORMAL = torch.inference_mode(False)  # a table made in inference mode could not be written outside of it


def _rule(cast: Cast, recipe: Recipe) -> tuple[float, int, bool]:
    """A slot's column of `rules`, as `scale_update` reads it."""
    return cast.format.max / 2.0**recipe.margin if cast.delayed else 0.0, recipe.window, cast.power_of_2


class ScalingState:
    """Scales, histories and counters of the FP8 layers that were converted together.

    layers: (name, recipe) of each; slot SLOTS[j] of layer i is column 4 * i + j.
    """

    def __init__(self, layers: Iterable[tuple[str, Recipe]], device: torch.device | str = "cpu"):
        self.layers = list(layers)
        self.delayed = sum(recipe.delayed for _, recipe in self.layers)  # how many layers have a predicted scale
        # Whether every backward casts gradients, so that their counters tell of it.
        self.casts_gradients = all(recipe.dgrad[0].is_fp8 and recipe.wgrad[0].is_fp8 for _, recipe in self.layers)
        self.forward = RootForward()
        self.groups: dict[int, str] = {}  # by column, the process group over which that operand is divided
        self.divided = ""  # name of the process group over which layers are divided: its ranks decide alike
        self.parents = siblings(name for name, _ in self.layers)
        self.shares = any(parent is not None for parent in self.parents)  # whether any layers may read one tensor
        self.ranks = ""  # name of the process group whose amaxes are joined; "": DistributedDataParallel's, if any
        self.backward_seen = False  # a backward pass has recorded amaxes that no update has entered yet
        self.begun = False  # a training step has begun
        self.watched = False  # a root's forward begins its steps
        self.predictions = 0  # how often scales were predicted
        # Called when a training step begins, scales predicted; with whether a backward pass came since the last.
        self.on_step: Callable[[bool], None] | None = None
        self.controller: Any = None  # auto's Controller, which `on_step` calls; None for layers with fixed recipes
        self.samples: StepSamples | None = None  # of this step; None in a step that is not sampled
        # Where fe.distributed.fsdp gathers weights: steps of the optimizer, and how many there were at the last forward
        # with gradients.
        self.optimizer_steps, self.trained = 0, -1
        self.root: weakref.ref[nn.Module] | None = None  # the model whose forward began last, where `on_step` is called
        self.formats_stay = False  # whether it begins in a graph that may not be divided: whole_graph.py
        self.decides_next = False  # whether `on_step` is to be called at the root's next forward without gradients too
        self.loaded = False  # whether a saved state was put back, or is not wanted: convert/resumed.py
        self.step_amax_S: torch.Tensor | None = None  # the last step's amaxes, where `on_step` reads them
        self.outputs = OutputSlots()
        self.columns = [Column() for _ in self.layers for _ in SLOTS]
        self._reset(torch.device(device))

    @NORMAL
    def _reset(self, device: torch.device) -> None:
        """Fresh tables: nothing seen, no scale known."""
        depth = max([recipe.history for _, recipe in self.layers if recipe.delayed], default=0)
        not_stored = (0.0, 1, False)
        rules = [
            not_stored if role == OUTPUT else _rule(getattr(recipe, role), recipe)
            for _, recipe in self.layers
            for role in SLOTS
        ]
        self.rules_3S = torch.tensor(rules, dtype=torch.float32, device=device).reshape(-1, 3).t().contiguous()
        self.history_HS = torch.zeros(depth, len(rules), dtype=torch.float32, device=device)
        self.live_2S = torch.zeros(2, len(rules), dtype=torch.float32, device=device)
        self.live_2S[0] = -1.0
        self.counts_CS = torch.zeros(len(COUNTERS), len(rules), dtype=torch.int64, device=device)
        self.evals_CS, self.before_CS = torch.zeros_like(self.counts_CS), None  # operands' without gradients
        self.saved_1 = torch.zeros(1, dtype=torch.int64, device=device)  # whether a save decides a join: ranks.py
        # How many gradients were cast when amaxes were entered last, -1 before: ops/scale_update.py.
        self.entered_1 = torch.full((1,), -1, dtype=torch.int64, device=device)
        self.graphs_1 = torch.zeros(1, dtype=torch.int64, device=device)  # steps begun by graphs alone: columns.py
        self.outputs.begin(len(self.layers), device)
        for layer, (_, recipe) in enumerate(self.layers):
            self._follow(layer, recipe)
        self._make_views()

    def _follow(self, layer: int, recipe: Recipe) -> None:
        """The layer stores its result as the recipe says."""
        stored, column = recipe.stored, self.column(layer, OUTPUT)
        if stored is not None:
            self.rules_3S[1, column], self.rules_3S[2, column] = recipe.window, stored.power_of_2
            top = stored.format.max
            self.outputs.rule(layer, top / 2.0**recipe.stored_margin, top, self.rules_3S, self.live_2S)
        elif layer in self.outputs.layers:
            self.outputs.rule(layer, 0.0, 0.0, self.rules_3S, self.live_2S)

    def _make_views(self) -> None:
        """Views of the two tables that every cast writes: per column, and NumPy's where they are real CPU memory."""
        self.live_2S, self.counts_CS = apart(self.live_2S), apart(self.counts_CS)
        for i, column in enumerate(self.columns):
            column.live_21, column.counts_C1 = self.live_2S[:, i : i + 1], self.counts_CS[:, i : i + 1]
        on_cpu = type(self.live_2S) is torch.Tensor and self.device.type == "cpu"
        self._host = (self.live_2S.numpy(), self.counts_CS.numpy()) if on_cpu else None
        tables = (self.live_2S, self.counts_CS)
        self.slots = [Slots(tables, len(SLOTS) * i, self._host, self.groups) for i in range(len(self.layers))]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_host": None, "slots": None, "root": None}  # copied views would not follow

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._make_views()
        self.sample(self.samples)

    def sample(self, samples: StepSamples | None) -> None:
        """Describe the tensors of this step there; None: nowhere."""
        self.samples = samples
        for layer in range(len(self.layers)):
            for column, role in zip(self.columns_of(layer), SLOTS, strict=True):
                column.sample = None if samples is None else samples.of(layer, role)

    def columns_of(self, layer: int) -> tuple[Column, ...]:
        """The columns of a layer's SLOTS."""
        return tuple(self.columns[len(SLOTS) * layer :][: len(SLOTS)])

    @property
    def must_wait(self) -> bool:
        """Whether no recipe may change: gathered weights have one format from a forward to the optimizer's step."""
        return self.trained == self.optimizer_steps

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.live_2S.device

    @NORMAL
    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow `Module._apply` to its device; a change of dtype leaves the tables as they are."""
        try:
            where = fn(torch.empty(0, dtype=torch.uint8, device=self.device)).device
        except NotImplementedError:  # torch raises this for `.to` of tables on the meta device (weights loaded since)
            where = fn(torch.empty(0, dtype=torch.uint8)).device
        if where == self.device:
            return
        self.step_amax_S = None
        self.sample(None)
        if self.device.type == "meta":
            self._reset(where)
            return
        for name in ("rules_3S", "history_HS", "live_2S", "counts_CS", "evals_CS", "saved_1", "entered_1", "graphs_1"):
            setattr(self, name, getattr(self, name).to(where))
        self.outputs.to(where)
        self._make_views()

    def divide(self, layer: int, roles: Iterable[str], group: str) -> None:
        """These operands of a layer are divided over a process group: casts per tensor take the amax of all ranks."""
        self.groups |= {self.column(layer, role): group for role in roles}
        self.divided = group
        self._make_views()

    def begin_forward(self, root: nn.Module | None = None, *_: object) -> None:
        """The root's forward begins: a step may begin with it, and its layers may share their inputs' operands."""
        if torch.compiler.is_compiling():
            if self.on_step is not None and begins_between(self):
                begin_between(self, root)
                return
            self.begin_in_graph(waits=False)
            if _torch.traced_alone("ScalingState.begin_forward"):  # written to, an input that may move: no CUDA graph
                self.graphs_1.add_(1)
            return
        if self.on_step is not None and root is not None:
            self.root, self.formats_stay = weakref.ref(root), False
        self.begin_step(root=True)
        evaluates = self.on_step is not None and not (torch.is_grad_enabled() or _torch.runs_again())
        self.before_CS = self.counts_CS.clone() if evaluates else None
        if self.shares:
            self.forward.begin()

    def end_forward(self, root: object = None, inputs: object = None, result: object = None) -> None:
        """The root's forward has ended, or failed: nothing that was made of its inputs outlives it.

        result: a loss that the model returns is kept for `auto` in a step that is sampled.  Its gradient is a backward
        of blocks that are compiled one by one too, whose graphs tell nobody.
        """
        if torch.compiler.is_compiling():
            if self.on_step is not None and _torch.may_divide():
                end_between(self, result)
            return
        if self.on_step is not None and torch.is_grad_enabled():
            for leaf in _torch.tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    leaf.grad_fn.register_prehook(self._backward_comes)
        if self.before_CS is not None:
            self.evals_CS += self.counts_CS - self.before_CS
        if self.samples is not None:
            loss = getattr(result, "loss", None)
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self.samples.see_loss(loss)
        if self.shares:
            self.forward.end()

    def _backward_comes(self, _: object) -> None:
        self.backward_seen = True

    def watch(self, root: nn.Module) -> None:
        """Follow the forwards of the model that the layers are part of."""
        self.watched = True
        root.register_forward_pre_hook(self.begin_forward)
        root.register_forward_hook(self.end_forward, always_call=True)

    def begin_step(self, root: bool = False) -> None:
        """Enter the last step's amaxes, if this is a training step and not a recompute.  root: its forward begins."""
        if _torch.transforms_active():
            return  # layers in FP8 refuse torch.func's transforms; in 16 bits they are no step
        if _torch.graph_task() != -1:
            return
        trains = torch.is_grad_enabled() or _torch.runs_again()
        if trains or not (self.begun or self.on_step is None) or (root and self.decides_next):
            self.fold(trains)

    def begin_in_graph(self, waits: bool = True) -> None:
        """Enter the last step's amaxes, in a graph that torch.compile traces, if it is one for training.

        waits: not unless a backward has come since, as in `enter`; the root's forward does not wait.
        Where no scale is predicted too: a fill would be a declared write, of a copy, which the layers' effects write.
        """
        if torch.is_grad_enabled():
            self._predict(waits)
            if not waits:  # else a layer of this forward that runs in eager code begins the step again
                self.backward_seen = False

    def enter(self) -> None:
        """A layer's forward begins (not compiled): `begin_step`, if a backward pass has ended a step since, if
        `on_step` has not been called for the first, or if all that it was called for were evaluations.
        """
        if _torch.graph_task() == -1 and (
            self.backward_seen
            or (self.on_step is not None and (not self.begun or (self.decides_next and torch.is_grad_enabled())))
            or not (self.watched or self._no_graph_came())
        ):
            self.begin_step()

    def _no_graph_came(self) -> bool:
        """Whether no backward of a compiled graph, which tells nobody, has ended a step; a card is not waited for."""
        if self._host is None or not (self.delayed and self.casts_gradients):
            return True
        return self.entered_1.item() in (-1, self._host[1][0, GRAD_OUTPUT].sum())

    def fold(self, trains: bool = True) -> None:
        """Enter this step's amaxes into the windows and predict the next scales.  trains: else a rank may be alone."""
        came, self.begun = self.backward_seen, True
        if self._host is None:  # not on a CPU: a card may measure itself
            step_begins(self.device, self, came)
        self.backward_seen = False
        if self.on_step is not None:
            self.step_amax_S = self.live_2S[0].clone()
        if trains:
            self._update()
        if self.on_step is not None:
            self.on_step(came)

    def _predict(self, waits: bool) -> None:
        casts = GradientCasts(self.counts_CS, self.entered_1, waits and self.casts_gradients)
        scale_update(self.history_HS, self.live_2S, self.rules_3S, self.ranks, self.saved_1, casts)

    def _update(self) -> None:
        if self.delayed:
            self.predictions += 1
            self._predict(False)
            self.outputs.settle(self.counts_CS)
            self.outputs.after_update(self.history_HS, self.live_2S, self.rules_3S)
        else:
            (self.live_2S if self._host is None else self._host[0])[0] = -1.0

    @NORMAL
    def adopt(self, layer: int, recipe: Recipe) -> None:
        """A layer follows another recipe from now on.  Histories stay; a scale for another format's range does not.

        The table gets deeper where the recipe's history is longer.
        """
        name, before = self.layers[layer]
        self.layers[layer] = (name, recipe)
        self._follow(layer, recipe)
        self.delayed += recipe.delayed - before.delayed
        if recipe.delayed and (more := recipe.history - len(self.history_HS)) > 0:
            self.history_HS = torch.cat([self.history_HS, self.history_HS.new_zeros(more, self.history_HS.shape[1])])
        for role in ROLES:
            cast, index = getattr(recipe, role), self.column(layer, role)
            rule = torch.tensor(_rule(cast, recipe), dtype=torch.float32)
            self.rules_3S[:, index] = rule.to(self.device, non_blocking=True)  # without waiting for the device
            if cast != getattr(before, role) or recipe.margin != before.margin:
                self.live_2S[1, index] = 0.0

    def forget(self, layer: int) -> None:
        """A layer as before its first step, in place: graphs hold the tables."""
        at = slice(len(SLOTS) * layer, len(SLOTS) * (layer + 1))
        self.outputs.settle(self.counts_CS)
        self.history_HS[:, at] = self.counts_CS[:, at] = self.live_2S[1, at] = 0
        self.live_2S[0, at] = self.entered_1[0] = -1
        if layer in self.outputs.layers:
            self.outputs.rule(layer, 0.0, 0.0, self.rules_3S, self.live_2S)
            self._follow(layer, self.layers[layer][1])

    def rescale_gradients(self, factor: float) -> None:
        """The loss scale was multiplied by `factor`: so are the gradients' past amaxes, and their scales follow."""
        if not factor > 0:
            raise StateError(f"rescale_gradients({factor}): a loss scale changes by a positive factor")
        self.history_HS[:, GRAD_OUTPUT] *= factor
        self.live_2S[1, GRAD_OUTPUT] = (self.live_2S[1, GRAD_OUTPUT] / factor).clamp_(max=FP32_MAX)
        amax = self.live_2S[0, GRAD_OUTPUT]
        self.live_2S[0, GRAD_OUTPUT] = torch.where(amax > 0, amax * factor, amax)

    def view(self, name: str, layer: int, role: str) -> SlotView:
        """The slot of `role` of the layer-th layer, one of `roles`, under that name."""
        if self.device.type == "meta":  # nothing has run: as a fresh table says it
            return ScalingState([self.layers[layer]]).view(name, 0, role)
        recipe = self.layers[layer][1]
        index, margin, cast = self.column(layer, role), recipe.margin, self.cast(layer, role)
        amax, s = self.live_2S[:, index].clone()
        if role == OUTPUT:
            self.outputs.settle(self.counts_CS)
            stored = self.outputs.scale_L[layer]
            s = torch.where(stored > 0, 1.0 / stored, 0.0)
            margin = round(math.log2(cast.format.max / float(self.rules_3S[0, index]))) if recipe.stored else 0
        history = self.history_HS[: recipe.history if recipe.delayed else 0, index].clone()
        if amax < 0:
            amax = history[0] if len(history) else torch.zeros_like(amax)
        scale = torch.where(s > 0, 1.0 / s, 1.0)
        counters = dict(zip(COUNTERS, self.counts_CS[:, index].clone(), strict=True))
        return SlotView(name, cast.format, cast, scale, amax, history, **counters, margin=margin)

    def cast(self, layer: int, role: str) -> Cast:
        """What a slot is cast to now."""
        recipe = self.layers[layer][1]
        return recipe.stored or Cast(recipe.output) if role == OUTPUT else getattr(recipe, role)

    def column(self, layer: int, role: str) -> int:
        """Where the tables hold the slot of a role, and where `samples` describes it."""
        return len(SLOTS) * layer + SLOTS.index(role)

    def roles(self, layer: int) -> tuple[str, ...]:
        """The roles of a layer's slots that are in use: of its result, once it is to be stored."""
        return SLOTS if layer in self.outputs.layers else ROLES
