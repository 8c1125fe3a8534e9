"""fe.distributed.plan: bytes, memory and predicted time of a sharded training step on ranks that are not there.

The real fully_shard, and the real fe.distributed.fsdp, run one step of the real model in one process: torch's "fake"
process group stands for all ranks, and FakeTensorMode for all memory.  Bytes are those that a run with as many real
processes sends (tests/distributed/test_plan.py compares them); seconds are predicted (clusters.py).

    total(N blocks) = f(2) + (N - 2) · (f(3) - f(2))       where f(n) is the step of the model cut to n equal blocks

Equal blocks send equal bytes and save equally much, so a model of one stack of equal blocks is run with 2 and with 3.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fp8engine import _torch
from fp8engine.convert.blocks import repeated_blocks
from fp8engine.convert.swap import plan as decisions_of
from fp8engine.distributed.clusters import CLUSTERS, MEMORY, Work, predict
from fp8engine.distributed.decoders import decoder_plan
from fp8engine.distributed.step import ACTIVATIONS, Step, Way, mesh_of, run_step
from fp8engine.errors import ConversionError, ParallelError
from fp8engine.numerics.recipe import Recipe, resolve

HIGH, GATHERED = "16 bits", "FP8 gather"
WAYS = {HIGH: (False, HIGH), "FP8, 16-bit gather": (True, HIGH), GATHERED: (True, GATHERED)}  # FP8 matmuls; traffic
AGAIN = "a block computed again"
PLAIN, CHECKPOINTED = "without checkpointing", "with checkpointing"
RUN = (2, 3)  # blocks that are run


@dataclass(frozen=True)
class Plan:
    """A planned step: `to_dict()` has the numbers.

    traffic, memory: by HIGH and GATHERED, then by kind, bytes of one rank.  predicted: by cluster, then by WAYS.
    held: bytes of one rank with FP8 gather, by PLAIN and CHECKPOINTED.  fits: by card, whether they fit its memory.
    """

    facts: dict[str, Any]
    traffic: dict[str, dict[str, dict[str, int]]]
    memory: dict[str, dict[str, int]]
    predicted: dict[str, dict[str, dict[str, float]]]

    @property
    def held(self) -> dict[str, int]:
        """What a rank holds, without and with activation checkpointing."""
        return self.facts["held"]

    @property
    def fits(self) -> dict[str, dict[str, bool]]:
        """Whether that fits each card."""
        return {card: {how: size <= whole for how, size in self.held.items()} for card, whole in MEMORY.items()}

    def verdict(self) -> list[str]:
        """What a rank holds, and which cards that fits, in a line; with checkpointing in a second, where one does not.

        "a rank holds 302 GB: does not fit an H100's 80 GB, an H200's 141 GB", "with checkpointing 21 GB: fits ..."
        """
        here = CHECKPOINTED if self.facts["checkpointing"] else PLAIN
        lines = [f"a rank holds {_cards(self.held[here])}"]
        if here == PLAIN and not all(fit[PLAIN] for fit in self.fits.values()):
            lines.append(f"{CHECKPOINTED} {_cards(self.held[CHECKPOINTED])}")
        return lines

    def to_dict(self) -> dict:
        """Plain numbers, for JSON."""
        found = {**self.facts, "traffic": self.traffic, "memory": self.memory, "predicted": self.predicted}
        return {**found, "fits": self.fits}


def _cards(size: int) -> str:
    """Bytes in GB, and the cards that they fit."""
    told = f"{size / 1e9:.0f} GB" if size >= 10e9 else f"{size / 1e9:.2g} GB"
    for says, wanted in (("fits", True), ("does not fit", False)):
        named = [f"an {card}'s {whole / 1e9:.0f} GB" for card, whole in MEMORY.items() if (size <= whole) is wanted]
        told += f"{':' if told.endswith('GB') and ':' not in told else ';'} {says} {', '.join(named)}" * bool(named)
    return told


def plan(
    model: nn.Module,
    ranks: int,
    tokens: int,
    recipe: str | Recipe = "rowwise",
    *,
    tp: int = 1,
    sequence: int | None = None,
    checkpointing: bool = False,
) -> Plan:
    """Plan a training step of `model` on `ranks` cards, each with `tokens` tokens, with and without FP8 gather.

    model: takes token ids [batch, sequence], and is not changed; on the meta device it needs no memory.
    sequence: tokens of one sequence; None: all of a card's.  tp: cards that share each layer, and what they send is run
    too where `decoder_plan` knows the model, else computed by formula, on top of FSDP over ranks / tp.
    checkpointing: each block is computed again in backward; what a rank then holds is told without it too.
    "auto" is planned with the formats that it begins with, in a step that it does not sample.
    BF16 computation, FP32 weights, gradients summed in FP32, AdamW.
    Raises ParallelError where a process group is there already, or numbers do not divide; ConversionError for a model
    that is not run by token ids, or with nothing to convert.
    """
    recipe, sequence = resolve(recipe), sequence or tokens
    _check(model, ranks, tokens, tp, sequence)
    formula = _why_by_formula(model) if tp > 1 else ""
    run = 1 if formula else tp  # cards that share each layer in what is run
    stack, blocks = _stack(model), len(repeated_blocks(model))
    found: dict[Way, Step] = {}
    with _ranks(ranks // tp, run) as mesh:
        for way in (Way(used, again) for used in (None, recipe) for again in (False, True)):
            cuts = (_cut(model, stack, count) for count in (RUN if stack else (blocks,)))
            steps = [run_step(cut, way, mesh, (tokens * run // sequence, sequence)) for cut in cuts]
            found[way] = steps[0].grown(steps[-1], blocks - RUN[0])
    ways = {name: Way(used, checkpointing) for name, used in ((HIGH, None), (GATHERED, recipe))}
    share = tp // run  # of what is not run, all but the activations is divided by formula
    traffic = {name: _sent(found[way], ranks // tp, tp, share) for name, way in ways.items()}
    if formula:
        for name, extra in _tensor_parallel(model, tokens, tp).items():
            traffic[name] |= extra
    memory = {name: _held(found, way, share, blocks) for name, way in ways.items()}
    both = {PLAIN: Way(recipe), CHECKPOINTED: Way(recipe, checkpointing=True)}
    held = {name: sum(_held(found, way, share, blocks).values()) for name, way in both.items()}
    work = _work(model, recipe, (tokens, tp), found[ways[HIGH]].flops, 4 if checkpointing else 3)
    sent = {name: [(x["bytes"], x["ranks"], x["apart"]) for x in kinds.values()] for name, kinds in traffic.items()}
    predicted = {
        cluster.name: {way: predict(cluster, work, fp8, sent[name]) for way, (fp8, name) in WAYS.items()}
        for cluster in CLUSTERS
    }
    facts = {
        "ranks": ranks,
        "tp": tp,
        "tensor_parallel": formula or ("run" if tp > 1 else ""),
        "tokens": tokens,
        "sequence": sequence,
        "recipe": recipe.name,
        "checkpointing": checkpointing,
        "parameters": sum(p.numel() for p in model.parameters()),
        "blocks": blocks,
        "blocks_run": list(RUN) if stack else [blocks],
        "held": held,
    }
    return Plan(facts, traffic, memory, predicted)


def _why_by_formula(model: nn.Module) -> str:
    """Why tensor parallelism is not run; "" where it is."""
    try:
        decoder_plan(model)
    except ParallelError as error:
        return f"by formula: {error}"
    return ""


def _held(found: dict[Way, Step], way: Way, share: int, blocks: int) -> dict[str, int]:
    """What a rank holds, by kind.  With checkpointing a block's activations are there again while it is computed."""
    step = found[way]
    held = {kind: size if kind == ACTIVATIONS else size // share for kind, size in step.memory.items()}
    if way.checkpointing:
        whole = found[replace(way, checkpointing=False)].memory[ACTIVATIONS]
        held[AGAIN] = (whole - held[ACTIVATIONS]) // max(blocks, 1)  # of the mean block
    return held


def _check(model: nn.Module, ranks: int, tokens: int, tp: int, sequence: int) -> None:
    if dist.is_initialized():
        raise ParallelError("plan: torch.distributed is initialised already; plan in a process of its own")
    for name, whole, part in (("ranks", ranks, tp), ("tokens", tokens, sequence)):
        of = "tp" if name == "ranks" else "sequence"
        if min(whole, part) < 1 or whole % part:
            raise ParallelError(f"plan: {name}={whole} is not a multiple of {of}={part}")
    ConversionError.unless(model, nn.Module, "plan takes an nn.Module")


@contextlib.contextmanager
def _ranks(shards: int, tp: int) -> Iterator[dist.DeviceMesh]:
    """A mesh of ranks that are not there, as `run_step` takes it."""
    _torch.begin_fake_ranks(shards * tp)
    try:
        yield mesh_of(shards, tp)
    finally:
        dist.destroy_process_group()


def _stack(model: nn.Module) -> str | None:
    """The name of the stack that holds all of a model's repeated blocks, if they are equal and more than are run."""
    blocks = repeated_blocks(model)
    if len(blocks) <= max(RUN) or len({_signature(block) for block in blocks}) > 1:
        return None
    same = (
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and [id(child) for child in module] == [id(block) for block in blocks]
    )
    return next(same, None)


def _signature(block: nn.Module) -> tuple:
    modules = ((name, type(module).__qualname__, module.extra_repr()) for name, module in block.named_modules())
    return (*modules, *((name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()))


def _cut(model: nn.Module, stack: str | None, count: int) -> nn.Module:
    """A copy of the model on the meta device, its stack cut to `count` blocks; tied weights stay tied."""
    memo: dict[int, Any] = {id(p): nn.Parameter(_on_meta(p), p.requires_grad) for p in model.parameters()}
    memo |= {id(x): _on_meta(x) for x in model.buffers()}
    if stack is not None:
        whole = model.get_submodule(stack)
        memo[id(whole)] = copy.deepcopy(cast(nn.ModuleList, whole)[:count], memo)
    return copy.deepcopy(model, memo)


def _on_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="meta")


def _work(model: nn.Module, recipe: Recipe, tokens: tuple[int, int], flops: float, matmuls: int) -> Work:
    """FLOPs of a card's step, and the layers that FP8 makes faster; experts are counted at 16 bits.

    tokens: (of a card, cards that share each layer); the tokens of all of them pass a card's share of a layer.
    """
    count, tp = tokens
    decisions = decisions_of(model, recipe)
    shapes = Counter(tuple(d.shape) for d in decisions if d.recipe and d.recipe.is_fp8 and len(d.shape) == 2)
    layers = tuple((max(n // tp, 1), k, times) for (n, k), times in shapes.items())
    return Work(count * tp, layers, flops, recipe, matmuls)


def _sent(step: Step, shards: int, tp: int, share: int) -> dict[str, dict[str, int]]:
    """Bytes that a rank sends, by "kind dtype".  share: cards that hold each weight together, which was run whole."""
    found = {}
    for (kind, dtype), size in sorted(step.sent.items()):
        ranks, apart = {"tp": (tp, 1), "all": (shards * tp, 1)}.get(kind.split()[0], (shards, tp))
        calls = step.calls[kind, dtype]
        found[f"{kind} {dtype}"] = {"bytes": size // share, "calls": calls, "ranks": ranks, "apart": apart}
    return found


def _tensor_parallel(model: nn.Module, tokens: int, tp: int) -> dict[str, dict[str, dict[str, int]]]:
    """What sequence parallelism sends in a block and step, by formula: nothing of it is run.

    Before q, k, v and before gate, up the tokens' rows [tokens · tp, h] are gathered, after o and down they are
    reduced; backward gathers and reduces as often.  Each of 4 gathers and 4 reductions sends (tp - 1) · tokens · h
    elements: of 2 bytes, or for gathers of FP8 rows 1 byte and a 4-byte scale a row.
    """
    widths, blocks = [], repeated_blocks(model)
    for block in blocks:
        first = next((module for module in block.modules() if isinstance(module, nn.Linear)), None)
        if first is None:
            raise ParallelError(f"plan: tp={tp}, and block {type(block).__name__} has no nn.Linear")
        widths.append(first.in_features)
    rows, group = 4 * (tp - 1) * tokens, {"calls": 4 * len(blocks), "ranks": tp, "apart": 1}
    row = 2 * sum(widths)  # bytes of a row of each block, in 16 bits
    gathers = {HIGH: ("bfloat16", row), GATHERED: ("uint8", sum(width + 4 for width in widths))}
    return {
        name: {
            f"tp all-gather {dtype}": {"bytes": rows * size, **group},
            "tp reduce-scatter bfloat16": {"bytes": rows * row, **group},
        }
        for name, (dtype, size) in gathers.items()
    }
