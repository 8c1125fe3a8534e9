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
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fp8engine import _torch
from fp8engine.convert.swap import convert
from fp8engine.convert.swap import plan as decisions_of
from fp8engine.distributed.blocks import repeated_blocks
from fp8engine.distributed.clusters import CLUSTERS, Work, predict
from fp8engine.distributed.fsdp import fsdp
from fp8engine.distributed.traffic import Traffic
from fp8engine.errors import ConversionError, ParallelError
from fp8engine.numerics.recipe import Recipe, resolve

HIGH, GATHERED = "16 bits", "FP8 gather"
WAYS = {HIGH: (False, HIGH), "FP8, 16-bit gather": (True, HIGH), GATHERED: (True, GATHERED)}  # FP8 matmuls; traffic
ACTIVATIONS = "saved activations"
MOMENTS = 2  # of AdamW, in the parameters' dtype
RUN = (2, 3)  # blocks that are run
IN_FLIGHT = 2  # blocks whose weights are whole at once: the one that computes and the next


@dataclass(frozen=True)
class Plan:
    """A planned step: `to_dict()` has the numbers.

    traffic, memory: by HIGH and GATHERED, then by kind, bytes of one rank.  predicted: by cluster, then by WAYS.
    """

    facts: dict[str, Any]
    traffic: dict[str, dict[str, dict[str, int]]]
    memory: dict[str, dict[str, int]]
    predicted: dict[str, dict[str, dict[str, float]]]

    def to_dict(self) -> dict:
        """Plain numbers, for JSON."""
        return {**self.facts, "traffic": self.traffic, "memory": self.memory, "predicted": self.predicted}


def plan(
    model: nn.Module,
    ranks: int,
    tokens: int,
    recipe: str | Recipe = "rowwise",
    *,
    tp: int = 1,
    sequence: int | None = None,
) -> Plan:
    """Plan a training step of `model` on `ranks` cards, each with `tokens` tokens, with and without FP8 gather.

    model: takes token ids [batch, sequence], and is not changed; on the meta device it needs no memory.
    sequence: tokens of one sequence; None: all of a card's.  tp: cards that share each layer: what they do is computed
    by formula (`_tensor_parallel`), on top of FSDP over ranks / tp.
    BF16 computation, FP32 weights, gradients summed in FP32, AdamW, no activation checkpointing.
    Raises ParallelError where a process group is there already, or numbers do not divide; ConversionError for a model
    that is not run by token ids, or with nothing to convert.
    """
    recipe, sequence = resolve(recipe), sequence or tokens
    _check(model, ranks, tokens, tp, sequence)
    shards = ranks // tp
    stack, blocks = _stack(model), len(repeated_blocks(model))
    ids = (tokens // sequence, sequence)
    found = {}
    with _ranks(shards) as mesh:
        for name, used in ((HIGH, None), (GATHERED, recipe)):
            steps = [_step(_cut(model, stack, count), used, mesh, ids) for count in (RUN if stack else (blocks,))]
            found[name] = steps[0].grown(steps[-1], blocks - RUN[0])
    work = _work(model, recipe, tokens, found[HIGH].flops)
    traffic = {name: _sent(step, shards, tp) for name, step in found.items()}
    if tp > 1:
        for name, extra in _tensor_parallel(model, tokens, tp).items():
            traffic[name] |= extra
    memory = {
        name: {kind: size if kind == ACTIVATIONS else size // tp for kind, size in step.memory.items()}
        for name, step in found.items()
    }
    share = _share(work, tp)
    sent = {name: [(x["bytes"], x["ranks"], x["apart"]) for x in kinds.values()] for name, kinds in traffic.items()}
    predicted = {
        cluster.name: {way: predict(cluster, share, fp8, sent[name]) for way, (fp8, name) in WAYS.items()}
        for cluster in CLUSTERS
    }
    facts = {
        "ranks": ranks,
        "tp": tp,
        "tokens": tokens,
        "sequence": sequence,
        "recipe": recipe.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "blocks": blocks,
        "blocks_run": list(RUN) if stack else [blocks],
    }
    return Plan(facts, traffic, memory, predicted)


@dataclass
class Step:
    """What one rank did in a step: bytes given to collectives and their number, memory by kind, FLOPs."""

    inputs: Counter = field(default_factory=Counter)
    calls: Counter = field(default_factory=Counter)
    memory: Counter = field(default_factory=Counter)
    flops: int = 0

    def grown(self, other: Step, times: int) -> Step:
        """self + times · (other - self): `other` is the step of a model with one more block."""

        def line(one: Counter, more: Counter) -> Counter:
            return Counter({key: one[key] + times * (more[key] - one[key]) for key in one | more})

        memory = line(self.memory, other.memory)
        memory["gathered weights"] = other.memory["gathered weights"]  # blocks in flight, however many there are
        memory["gradients to reduce"] = other.memory["gradients to reduce"]
        flops = self.flops + times * (other.flops - self.flops)
        return Step(line(self.inputs, other.inputs), line(self.calls, other.calls), memory, flops)


def _step(model: nn.Module, recipe: Recipe | None, mesh: dist.DeviceMesh, ids: tuple[int, int]) -> Step:
    """One training step of a model on the meta device, run on memory that is not there.  recipe None: 16 bits."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = repeated_blocks(model)
    if recipe is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a CPU emulates FP8: nothing is computed
            convert(model, recipe)
    with _torch.FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.to(torch.float32).to_empty(device="cpu")
        if recipe is not None:
            fsdp(model, mesh=mesh, blocks=blocks, mp_policy=policy)
        else:
            for block in blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        saved = Saved()
        with Traffic() as traffic, FlopCounterMode(display=False) as counter:
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
                loss = _result(model, torch.zeros(ids, dtype=torch.long)).float().square().mean()
            activations = saved.bytes(less=model.parameters())
            loss.backward()
        shards = sum(_torch.local_tensor(p).nbytes for p in model.parameters())
        gradients = sum(_torch.local_tensor(p.grad).nbytes for p in model.parameters() if p.grad is not None)
    gathered = Counter(size for (kind, _), sizes in traffic.inputs.items() if kind == "all-gather" for size in sizes)
    once = sum(size for size, calls in gathered.items() if calls == 1)  # the root's, kept from forward to backward
    block = max((size for size, calls in gathered.items() if calls > 1), default=0)
    reduced = (size for (kind, _), sizes in traffic.inputs.items() if kind == "reduce-scatter" for size in sizes)
    memory = {
        "parameters": shards,
        "gradients": gradients,
        "optimizer": MOMENTS * shards,
        "gathered weights": mesh.size() * (once + IN_FLIGHT * block),
        "gradients to reduce": max(reduced, default=0),
        ACTIVATIONS: activations,
    }
    inputs = Counter({key: sum(sizes) for key, sizes in traffic.inputs.items()})
    return Step(inputs, Counter(traffic.calls), Counter(memory), counter.get_total_flops())


class Saved:
    """Storages of the tensors that autograd has saved for backward, each once."""

    def __init__(self):
        self.storages: dict[StorageWeakRef, torch.UntypedStorage] = {}

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Note what x is made of; a hook of torch.autograd.graph.saved_tensors_hooks."""
        for part in _parts(x):
            storage = part.untyped_storage()
            self.storages[StorageWeakRef(storage)] = storage
        return x

    def bytes(self, less: Iterable[torch.Tensor]) -> int:
        """What they hold now, without these tensors; a weight that was freed after forward holds nothing."""
        apart = {StorageWeakRef(part.untyped_storage()) for x in less for part in _parts(x)}
        return sum(storage.nbytes() for ref, storage in self.storages.items() if ref not in apart)


def _parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor subclass is made of, or the tensor itself."""
    flatten = getattr(x, "__tensor_flatten__", None)
    if flatten is None:
        yield x
        return
    inside = (getattr(x, name) for name in flatten()[0])
    for part in inside:
        if isinstance(part, torch.Tensor):  # a DTensor names its mesh too
            yield from _parts(part)


def _result(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The floating-point tensor that a model makes of token ids."""
    options = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    try:
        found = model(ids, **options)
    except Exception as error:
        raise ConversionError(
            f"plan runs a model with token ids of shape {list(ids.shape)}; {_class_of(model)} raised "
            f"{type(error).__name__}: {error}"
        ) from error
    if hasattr(found, "to_tuple"):  # of transformers
        found = found.to_tuple()
    tensors = [x for x in _torch.tree_leaves(found) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not tensors:
        raise ConversionError(f"plan: {_class_of(model)} returns no floating-point tensor for token ids")
    return tensors[0]


def _class_of(model: nn.Module) -> str:
    """The name of the model's class before fully_shard."""
    return type(model).__name__.removeprefix("FSDP")


def _check(model: nn.Module, ranks: int, tokens: int, tp: int, sequence: int) -> None:
    if dist.is_initialized():
        raise ParallelError("plan: torch.distributed is initialised already; plan in a process of its own")
    for name, whole, part in (("ranks", ranks, tp), ("tokens", tokens, sequence)):
        of = "tp" if name == "ranks" else "sequence"
        if min(whole, part) < 1 or whole % part:
            raise ParallelError(f"plan: {name}={whole} is not a multiple of {of}={part}")
    if not isinstance(model, nn.Module):
        raise ConversionError(f"plan takes an nn.Module, not {type(model).__name__}")


@contextlib.contextmanager
def _ranks(ranks: int) -> Iterator[dist.DeviceMesh]:
    """A mesh of ranks that are not there."""
    _torch.begin_fake_ranks(ranks)
    try:
        yield dist.init_device_mesh("cpu", (ranks,))
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
    """A copy of the model on the meta device, its stack cut to `count` blocks."""
    made = copy.deepcopy(model).to("meta")
    if stack is not None:
        del cast(nn.ModuleList, made.get_submodule(stack))[count:]
    return made


def _work(model: nn.Module, recipe: Recipe, tokens: int, flops: float) -> Work:
    """FLOPs of a rank's step, and the layers that FP8 makes faster; experts are counted at 16 bits."""
    decisions = decisions_of(model, recipe)
    shapes = Counter(tuple(d.shape) for d in decisions if d.recipe and d.recipe.is_fp8 and len(d.shape) == 2)
    return Work(tokens, tuple((n, k, count) for (n, k), count in shapes.items()), flops, recipe)


def _share(work: Work, tp: int) -> Work:
    """A card's work where tp cards share each layer, and the tokens of all of them pass it."""
    layers = tuple((max(n // tp, 1), k, count) for n, k, count in work.layers)
    return replace(work, tokens=work.tokens * tp, layers=layers)


def _sent(step: Step, shards: int, tp: int) -> dict[str, dict[str, int]]:
    """Bytes that a rank sends, by "kind dtype": traffic.py's formulas.  1 / tp of each weight is on a card."""
    found = {}
    for (kind, dtype), given in sorted(step.inputs.items()):
        given //= tp
        share = {"all-gather": (shards - 1) * given, "all-reduce": 2 * (shards - 1) * given // shards}
        size = share.get(kind, (shards - 1) * given // shards)
        found[f"{kind} {dtype}"] = {"bytes": size, "calls": step.calls[kind, dtype], "ranks": shards, "apart": tp}
    return found


def _tensor_parallel(model: nn.Module, tokens: int, tp: int) -> dict[str, dict[str, dict[str, int]]]:
    """What sequence parallelism sends in a block and step, by formula: nothing of it is run.

    Before q, k, v and before gate, up the tokens' rows [tokens · tp, h] are gathered, after o and down they are
    reduced; backward gathers and reduces as often.  Each of 4 gathers and 4 reductions sends (tp - 1) · tokens · h
    elements: of 2 bytes, or for gathers of FP8 rows 1 byte and a 4-byte scale a row.
    """
    gather = {HIGH: 0, GATHERED: 0}
    reduce = 0
    blocks = repeated_blocks(model)
    for block in blocks:
        first = next((module for module in block.modules() if isinstance(module, nn.Linear)), None)
        if first is None:
            raise ParallelError(f"plan: tp={tp}, and block {type(block).__name__} has no nn.Linear")
        rows = (tp - 1) * tokens
        gather[HIGH] += 4 * rows * first.in_features * 2
        gather[GATHERED] += 4 * rows * (first.in_features + 4)
        reduce += 4 * rows * first.in_features * 2
    group = {"calls": 4 * len(blocks), "ranks": tp, "apart": 1}
    return {
        name: {
            f"tp all-gather {dtype}": {"bytes": gather[name], **group},
            "tp reduce-scatter bfloat16": {"bytes": reduce, **group},
        }
        for name, dtype in ((HIGH, "bfloat16"), (GATHERED, "uint8"))
    }
