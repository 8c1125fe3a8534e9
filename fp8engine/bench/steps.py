"""Benchmark of a whole network: a block or a model, forward and backward under every recipe, beside BF16's.

    over_bf16       time of the network in BF16, eager, over the variant's          over_compiled   compiled BF16's
    activations     bytes that autograd saves for backward, each storage once, parameters left out

"fp8engine X": fe.convert with the recipe X; "layer X": every block an fe.TransformerLayer, with its memory options.
A result is right if the output, and the gradient of the first linear layer's weight, which every other layer's went
into, are no further from the same network's in FP32 than the formats explain.  Launches and peak memory belong to a
card; on a CPU FP8 is emulated.
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
from fp8engine.bench.networks import NETWORKS, Size, fused
from fp8engine.bench.timing import Clock
from fp8engine.convert.swap import convert
from fp8engine.errors import EmulationWarning

RECIPES = ("current", "delayed", "rowwise", "blockwise")
WHOLE, GRAPHS, GRAPH = "compiled", "CUDA graphs", "one CUDA graph"  # words of Variant.graph
WARM_UP = 3  # steps before a capture: kernels are compiled, gradients allocated
MEMORY = {"": {}, ", recompute": {"recompute": True}, ", FP8 inputs": {"recompute": True, "store": "fp8"}}
BASE, COMPILED = "bf16", "bf16, compiled"
# Against FP32, in dB.  A residual stream of which a part went through matmuls at 28 dB stays above 25 for a dozen
# layers.  A gradient goes through E5M2 (24 dB) in every layer on its way and stays above 12; below, it is wrong.
LEAST_SQNR, LEAST_GRADIENT = 20.0, 10.0
# DESIGN section 9: block h 4096, f 14336, 8192 tokens of sequence 2048, over compiled BF16.
TARGET = 1.55
BIG = Size(4096, 14336, 32, 8)
MODELS = {
    "cuda": tuple((name, Size(2048, 5632, 16, 4, 12, 32000), 8192, 1024) for name in ("llama", "bert", "vit")),
    "cpu": tuple((name, Size(128, 384, 4, 2, 2), 128, 64) for name in ("llama", "bert", "vit")),
}


class Variant(NamedTuple):
    """A module in some precision: (plain module) -> it.  autocast: FP16 autocast around forward.

    graph: "" for eager code; "compiled" by torch.compile; "CUDA graphs" made by it, in its mode "reduce-overhead";
    "one CUDA graph": a step of eager code, captured once and replayed.
    """

    make: Callable[[nn.Module], nn.Module]
    graph: str = ""
    autocast: bool = False


def variants(where: torch.device, compiled: bool) -> dict[str, Variant]:
    """Variants of a network that can be measured there.  compiled: by torch.compile as well."""
    found = {BASE: Variant(bf16), "fp16 autocast": Variant(lambda network: network, autocast=True)}
    found |= {f"fp8engine {recipe}": Variant(converted(recipe)) for recipe in RECIPES}
    found |= {f"layer current{label}": Variant(_layer(**memory)) for label, memory in MEMORY.items()}
    in_graphs = ("layer current", BASE, *(f"fp8engine {recipe}" for recipe in RECIPES))
    return found | (as_graphs({name: found[name] for name in in_graphs}, where) if compiled else {})


def as_graphs(ways: Mapping[str, Variant], where: torch.device) -> dict[str, Variant]:
    """The same by torch.compile, half a minute each, and torchao's, which is made for it, where it is installed."""
    found = {f"{name}, compiled": way._replace(graph=WHOLE) for name, way in ways.items()}
    if where.type == "cuda" and importlib.util.find_spec("torchao") is not None:
        found["torchao tensorwise, compiled"] = Variant(torchao, WHOLE)
    return found


def bf16(module: nn.Module) -> nn.Module:
    """The module in BF16."""
    return module.bfloat16()


def converted(recipe: str) -> Callable[[nn.Module], nn.Module]:
    """fe.convert to a recipe, of the network in BF16."""

    def make(network: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmulationWarning)  # the result says it
            return convert(network.bfloat16(), recipe)

    return make


def _layer(**memory: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda network: fused(network.bfloat16(), "current", **memory)


def torchao(network: nn.Module) -> nn.Module:
    """torchao's float8, a scale a tensor."""
    from torchao.float8 import convert_to_float8_training

    keep = lambda module, name: "lm_head" not in name  # noqa: E731 - as fe.convert leaves output heads
    return convert_to_float8_training(network.bfloat16(), module_filter_fn=keep)


def steps(
    cases: Sequence[tuple[str, Size, int, int]],
    where: torch.device,
    ways: dict[str, Variant] | None = None,
    ticks: Clock | None = None,
    turns: int | None = None,
) -> dict[str, Any]:
    """Check and time every variant of every case (network, size, tokens, sequence): {"machine", "what", "rows"}."""
    ways = variants(where, where.type == "cuda") if ways is None else ways
    timer = Timer.of(where, ticks, turns, (20, 7))
    rows = [row for case in cases for row in compare(case, where, ways, timer)]
    return harness.result(where, harness.training_on(where), rows)


def compare(case, where: torch.device, ways: dict[str, Variant], timer: Timer) -> list[Row]:
    """One case's rows."""
    name, size, tokens, sequence = case
    network = NETWORKS[name]
    torch.manual_seed(0)
    with where:
        plain = network.make(size)
    random = torch.Generator(where).manual_seed(1)
    sets = [network.inputs(size, tokens, sequence, random) for _ in range(2)]
    y = plain(sets[0])
    dy = torch.randn(y.shape, generator=random, device=where)
    y.backward(dy)
    wanted = (y.detach(), _first(plain).grad, dy)
    plain.zero_grad(set_to_none=True)

    def derive(label: str, seconds: float, over: Callable) -> Row:
        aimed = where.type == "cuda" and size == BIG and label.endswith("current, compiled")
        ratios = {"over_bf16": over(BASE), "over_compiled": over(COMPILED)}
        return {"tokens_per_s": tokens / seconds, **ratios, "target": TARGET if aimed else None}

    checks = {
        label: lambda row, way=way: _checked(row, way, copy.deepcopy(plain), sets, wanted)
        for label, way in ways.items()
    }
    return harness.compare({"network": name, "size": str(size), "tokens": tokens}, checks, derive, timer)


def _checked(row: Row, way: Variant, network: nn.Module, sets, wanted) -> harness.Call:
    y_exact, dw_exact, dy = wanted
    made = way.make(network)
    low = next(made.parameters()).dtype
    pairs = [(x.to(low) if x.is_floating_point() else x, dy) for x in sets]
    _, step = training(way, made, pairs)
    for turn in range(WARM_UP if way.graph else 0):  # what is checked is what is timed, not what records it
        step(turn)
    row["sqnr"] = [round(sqnr(step(0), y_exact), 1), round(sqnr(_first(made).grad, dw_exact), 1)]
    if way.graph != GRAPH:  # whose hooks have run when it was captured
        row["activations"] = saved_bytes(made, lambda: step(0))
    row |= _on_card(step, y_exact.device)
    row["correct"] = row["sqnr"][0] >= LEAST_SQNR and row["sqnr"][1] >= LEAST_GRADIENT
    if not row["correct"]:
        row["why"] = f"wrong: {row['sqnr']} dB; no time, no ratio"
    return step


def training(way: Variant, made: nn.Module, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Any, Any]:
    """(forward, step) of a variant's module.  step: turn -> y, a forward and backward of the turn's (x, dy).

    Of a model its blocks are compiled, each by itself.  "one CUDA graph" has the first pair at every turn.
    """
    run = _compiled(made, None if way.graph == WHOLE else "reduce-overhead") if way.graph in (WHOLE, GRAPHS) else made

    def step(turn: int) -> torch.Tensor:
        x, dy = pairs[turn % len(pairs)]
        made.zero_grad(set_to_none=True)
        x.grad = None
        if way.graph == GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(x.device.type, torch.float16, enabled=way.autocast):
            y = run(x)
        y.backward(dy.to(y.dtype))
        return y

    if way.graph == GRAPH:
        graph, y = captured(step, pairs[0][1].device)
        return run, lambda turn: (graph.replay(), y)[1]
    return run, step


def _compiled(made: Any, mode: str | None) -> Any:
    """The module by torch.compile: a model's blocks one by one, which makes one graph of blocks that are alike."""
    for block in getattr(made, "blocks", ()):
        block.compile(fullgraph=True, mode=mode)
    return made if hasattr(made, "blocks") else torch.compile(made, fullgraph=True, mode=mode)


def captured(step: Callable[[int], Any], where: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A step in a CUDA graph, and what it returns, which every replay writes."""
    side = torch.cuda.Stream(where)
    side.wait_stream(torch.cuda.current_stream(where))
    with torch.cuda.stream(side):
        for turn in range(WARM_UP):
            step(turn)
    torch.cuda.current_stream(where).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = step(0)
    return graph, written


def _first(network: nn.Module) -> Any:
    """The weight of the first linear layer."""
    return next(module.weight for module in network.modules() if isinstance(module, nn.Linear))


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


def line(row: Row) -> str:
    """A row as plain text."""
    errors = "/".join(f"{value:.0f}" for value in row.get("sqnr", ()))
    return harness.line(
        f"{row['name']:28s} {row['network']:6s} {row['size']:34s}",
        {
            **row,
            "mib": row["activations"] / 2**20 if "activations" in row else None,
            "gib": row["peak_bytes"] / 2**30 if "launches" in row else None,
        },
        ("ms", "{:9.2f} ms"),
        ("spread", " {:4.0%}"),
        ("tokens_per_s", " {:9.0f} tokens/s"),
        ("over_bf16", " {:5.2f}x bf16"),
        ("over_compiled", " {:5.2f}x compiled"),
        ("correct", f"   y/dw {errors} dB"),
        ("mib", "   saved {:.1f} MiB"),
        ("gib", "   peak {:.2f} GiB"),
        ("launches", ", {} launches"),
        ("target", "   target {:.2f}"),
    )
