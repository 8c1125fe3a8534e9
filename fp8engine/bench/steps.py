"""Benchmark of training steps: a network's forward and backward under every recipe, beside BF16's.

    over_bf16       time of the network in BF16, eager, over the variant's          over_compiled   compiled BF16's
    activations     bytes that autograd saves for backward, each storage once, parameters left out

"fp8engine X": fe.convert with the recipe X.  A result is right if the output, the input's gradient where the input has
one, and the gradient of the first linear layer's weight, which every other layer's went into, are no further from the
same network's in high precision than the formats explain.  Launches and peak memory belong to a card; on a CPU FP8 is
emulated.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8engine.bench import harness
from fp8engine.bench.cases import sqnr
from fp8engine.bench.harness import Row, Timer
from fp8engine.convert.swap import convert
from fp8engine.errors import EmulationWarning

TRAINING = "forward and backward"
RECIPES = ("current", "delayed", "rowwise", "blockwise")
WARM_UP = 3  # steps of a compiled variant before it is checked: kernels are compiled, gradients allocated
BASE, COMPILED = "bf16", "bf16, compiled"
# Of output and gradient against FP32, in dB.  A residual stream of which a part went through matmuls at 28 dB stays
# above 25 for a dozen layers.  A gradient goes through E5M2 (24 dB) in every layer on its way and stays above 12.
LEAST_SQNR, LEAST_GRADIENT = 20.0, 10.0
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (x, dy), taken in turn
Step = Callable[[int], torch.Tensor]  # turn -> y, after the forward and backward of that turn's pair
Forward = Callable[[torch.Tensor], torch.Tensor]


def eager(made: nn.Module, pairs: Pairs) -> tuple[Forward, Step]:
    """(forward, step) of a network."""
    return made, lambda turn: _trained(made, made, pairs[turn % len(pairs)])


def compiled(made: Any, pairs: Pairs, mode: str | None = None) -> tuple[Forward, Step]:
    """The same by torch.compile: a model's blocks one by one, which makes one graph of blocks that are alike."""
    for block in getattr(made, "blocks", ()):
        block.compile(fullgraph=True, mode=mode)
    forward = made if hasattr(made, "blocks") else torch.compile(made, fullgraph=True, mode=mode)
    return forward, lambda turn: _trained(made, forward, pairs[turn % len(pairs)])


def _trained(made: nn.Module, forward: Forward, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, dy = pair
    made.zero_grad(set_to_none=True)
    x.grad = None
    y = forward(x)
    y.backward(dy.to(y.dtype))
    return y


class Case(NamedTuple):
    """A network to train.  about: its "network", "size" and "tokens" of a step, which each row has.

    make: it, in FP32.  inputs: x.  target: least over_compiled of a card under "current".
    """

    about: Row
    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], torch.Tensor]
    target: float | None = None

    def __str__(self) -> str:
        return " ".join(map(str, self.about.values()))


class Variant(NamedTuple):
    """A network in some precision: make: (plain network) -> it.  run: `eager`, `compiled` or another like them."""

    make: Callable[[nn.Module], nn.Module]
    run: Callable[[nn.Module, Pairs], tuple[Forward, Step]] = eager


def variants(where: torch.device, in_graphs: bool) -> dict[str, Variant]:
    """Variants of a network that can be measured there.  in_graphs: by torch.compile as well."""
    found = {BASE: Variant(bf16), "fp16 autocast": Variant(_autocast)}
    found |= {f"fp8engine {recipe}": Variant(converted(recipe)) for recipe in RECIPES}
    names = (BASE, *(f"fp8engine {recipe}" for recipe in RECIPES))
    return found | (as_graphs({name: found[name] for name in names}, where) if in_graphs else {})


def as_graphs(ways: Mapping[str, Variant], where: torch.device) -> dict[str, Variant]:
    """The same by torch.compile, half a minute each, and torchao's, which is made for it, where it is installed."""
    found = {f"{name}, compiled": way._replace(run=compiled) for name, way in ways.items()}
    if where.type == "cuda" and importlib.util.find_spec("torchao") is not None:
        found["torchao tensorwise, compiled"] = Variant(torchao, compiled)
    return found


def bf16(network: nn.Module) -> nn.Module:
    """The network in BF16."""
    return network.bfloat16()


def converted(recipe: str) -> Callable[[nn.Module], nn.Module]:
    """fe.convert to a recipe, of the network in BF16."""

    def make(network: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmulationWarning)  # the result says it
            return convert(network.bfloat16(), recipe)

    return make


def _autocast(network: nn.Module) -> nn.Module:
    where = next(network.parameters()).device.type
    network.forward = torch.autocast(where, torch.float16)(network.forward)
    return network


def torchao(network: nn.Module) -> nn.Module:
    """torchao's float8, a scale a tensor."""
    from torchao.float8 import convert_to_float8_training

    keep = lambda module, name: "lm_head" not in name  # noqa: E731 - as fe.convert leaves output heads
    return convert_to_float8_training(network.bfloat16(), module_filter_fn=keep)


def steps(
    cases: Sequence[Case], where: torch.device, ways: dict[str, Variant] | None = None, timer: Timer | None = None
) -> dict[str, Any]:
    """Check and time every variant of every case: {"machine", "what", "rows"}."""
    ways = variants(where, where.type == "cuda") if ways is None else ways
    timer = timer or Timer.of(where, 20, 7)
    return harness.result(where, TRAINING, [row for case in cases for row in compare(case, where, ways, timer)])


def compare(case: Case, where: torch.device, ways: Mapping[str, Variant], timer: Timer) -> list[Row]:
    """One case's rows."""
    torch.manual_seed(0)
    with where:
        plain = case.make()
    random = torch.Generator(where).manual_seed(1)
    sets = [case.inputs(random) for _ in range(2)]
    with torch.no_grad():
        dy = torch.randn(plain(sets[0]).shape, generator=random, device=where)
    right = Right(plain, [(x, dy) for x in sets], (LEAST_SQNR, LEAST_GRADIENT))

    def check(row: Row, way: Variant) -> harness.Call:
        made, _, step = right.check(row, way)
        if saved := saved_bytes(made, lambda: step(0)):  # the replay of a graph saves nothing anew
            row["activations"] = saved
        row |= _on_card(step, where)
        return step

    def derive(label: str, seconds: float, over: Callable) -> Row:
        aimed = where.type == "cuda" and label.endswith("current, compiled")
        ratios = {"over_bf16": over(BASE), "over_compiled": over(COMPILED)}
        return {"tokens_per_s": case.about["tokens"] / seconds, **ratios, "target": case.target if aimed else None}

    checks = {label: lambda row, way=way: check(row, way) for label, way in ways.items()}
    return harness.compare(case.about, checks, derive, timer)


class Right:
    """What a plain network in high precision computes of its first pair, and how near a variant has to come.

    least: dB, of y, of x's gradient where x has one, and of the first linear layer's weight's gradient.
    """

    def __init__(self, plain: nn.Module, pairs: Pairs, least: tuple[float, ...]):
        self.plain, self.pairs, self.least = plain, pairs, least
        self.wanted = _computed(plain, eager(plain, pairs)[1], pairs)
        plain.zero_grad(set_to_none=True)

    def check(self, row: Row, way: Variant) -> tuple[nn.Module, Forward, Step]:
        """(network, forward, step) of a variant; its "sqnr" and whether it is "correct" are put into the row."""
        made = way.make(copy.deepcopy(self.plain))
        dtype = next(made.parameters()).dtype
        pairs = [(_leaf(x, dtype), dy.to(dtype)) for x, dy in self.pairs]
        forward, step = way.run(made, pairs)
        for turn in range(0 if way.run is eager else WARM_UP):  # what is checked is what is timed
            step(turn)
        computed = _computed(made, step, pairs)
        row["sqnr"] = [round(sqnr(one, exact), 1) for one, exact in zip(computed, self.wanted, strict=True)]
        row["correct"] = all(found >= least for found, least in zip(row["sqnr"], self.least, strict=True))
        if not row["correct"]:
            row["why"] = f"wrong: {row['sqnr']} dB; no time, no ratio"
        return made, forward, step


def _computed(network: nn.Module, step: Step, pairs: Pairs) -> list[torch.Tensor]:
    y, x = step(0).detach(), pairs[0][0]
    weight: Any = next(module.weight for module in network.modules() if isinstance(module, nn.Linear))
    return [part for part in (y, x.grad, weight.grad) if part is not None]


def _leaf(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in that dtype if it is no index, with a gradient of its own."""
    return x.detach().to(dtype).requires_grad_(x.requires_grad) if x.is_floating_point() else x


def saved_bytes(network: nn.Module, step: Callable[[], object]) -> int:
    """Bytes of the storages that a step saves for backward, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    sizes: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return x.detach()  # x itself may be the result of the node that saves it, which then is never freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        made = step()  # held: the address of what is freed could be taken again
    total = sum(sizes.values())
    del made
    return total


def _on_card(step: Callable[[int], object], where: torch.device) -> dict[str, int]:
    """Peak memory and launches of a step, where there is a card."""
    if where.type != "cuda":
        return {}
    torch.cuda.reset_peak_memory_stats(where)
    step(0)
    peak = torch.cuda.max_memory_allocated(where)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(1)
        torch.cuda.synchronize(where)
    launches = sum(event.count for event in profile.key_averages() if event.device_type.name == "CUDA")
    return {"peak_bytes": peak, "launches": launches}
