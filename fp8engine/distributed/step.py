"""The accounts of one sharded training step of one rank: what it sends, holds and computes.

The planner runs the step on ranks and memory that are not there; what is counted is what real ranks count.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fp8engine import _torch
from fp8engine.convert.blocks import repeated_blocks
from fp8engine.convert.select import told_by_config
from fp8engine.convert.swap import convert
from fp8engine.distributed.decoders import decoder_plan
from fp8engine.distributed.fsdp import fsdp
from fp8engine.distributed.parallelize import tensor_parallel
from fp8engine.distributed.traffic import Traffic
from fp8engine.errors import ConversionError
from fp8engine.numerics.recipe import Auto, Recipe

ACTIVATIONS = "saved activations"
MOMENTS = 2  # of AdamW, in the parameters' dtype
IN_FLIGHT = 2  # blocks whose weights are whole at once: the one that computes and the next


@dataclass
class Step:
    """What one rank did in a step: bytes that it sent in collectives and their number, memory by kind, FLOPs."""

    sent: Counter = field(default_factory=Counter)
    calls: Counter = field(default_factory=Counter)
    memory: Counter = field(default_factory=Counter)
    flops: int = 0

    def grown(self, other: Step, times: int) -> Step:
        """self + times · (other - self): `other` is the step of a model with one more block."""

        def line(one: Counter, more: Counter) -> Counter:
            return Counter({key: one[key] + times * (more[key] - one[key]) for key in one.keys() | more.keys()})

        memory = line(self.memory, other.memory)
        memory["gathered weights"] = other.memory["gathered weights"]  # blocks in flight, however many there are
        memory["gradients to reduce"] = other.memory["gradients to reduce"]
        flops = self.flops + times * (other.flops - self.flops)
        return Step(line(self.sent, other.sent), line(self.calls, other.calls), memory, flops)


@dataclass(frozen=True)
class Way:
    """How a step computes: recipe None is 16 bits.  checkpointing: each block is computed again in backward."""

    recipe: Recipe | None
    checkpointing: bool = False


def mesh_of(shards: int, tp: int) -> dist.DeviceMesh:
    """Ranks in groups of `tp` that share each layer."""
    return dist.init_device_mesh("cpu", (shards, tp), mesh_dim_names=("dp", "tp"))


def run_step(model: nn.Module, way: Way, mesh: dist.DeviceMesh, ids: tuple[int, int]) -> Step:
    """One training step of a model on the meta device, run on memory that is not there.

    mesh: of `mesh_of`.  Where "tp" has several ranks, the model is divided by `decoder_plan`, in 16 bits too.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    model.to(torch.float32)  # of a BF16 checkpoint, whose optimizer steps in FP32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a CPU emulates FP8: nothing is computed
        _shard(model, way, mesh)
    with _torch.FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _to_empty(model)
        saved = Saved()
        with Traffic(groups_of(mesh)) as traffic, FlopCounterMode(display=False) as counter:
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
        "gathered weights": mesh["dp"].size() * (once + IN_FLIGHT * block),
        "gradients to reduce": max(reduced, default=0),
        ACTIVATIONS: activations,
    }
    return Step(traffic.bytes, traffic.calls, Counter(memory), counter.get_total_flops())


def _shard(model: nn.Module, way: Way, mesh: dist.DeviceMesh) -> None:
    """Convert, divide and shard a model on the meta device, where a mesh can be made and nothing is moved."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks, recipe, dp, tp = repeated_blocks(model), way.recipe, mesh["dp"], mesh["tp"]
    if isinstance(recipe, Auto):  # the step of its first formats that takes no samples, as most do
        recipe = replace(recipe, freeze_after=0)
    if recipe is not None or tp.size() > 1:  # tensor_parallel divides converted layers
        convert(model, recipe or "bf16")
    if way.checkpointing:
        recompute(blocks)
    if tp.size() > 1:
        tensor_parallel(model, tp, decoder_plan(model))
    if recipe is not None:
        fsdp(model, mesh=dp, blocks=blocks, mp_policy=policy)
    else:
        for block in [*blocks, model]:
            fully_shard(block, mesh=dp, mp_policy=policy)


def groups_of(mesh: dist.DeviceMesh) -> dict[str, str]:
    """The groups of a mesh that `Traffic` counts apart from those that shard weights."""
    everyone = cast(dist.ProcessGroup, dist.group.WORLD)
    found = {everyone.group_name: "all", mesh["tp"].get_group().group_name: "tp"} if mesh["tp"].size() > 1 else {}
    return {name: word for name, word in found.items() if name != mesh["dp"].get_group().group_name}


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Keep of each block its input alone, and compute the block again in backward: activation checkpointing."""
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _to_empty(model: nn.Module) -> None:
    """Memory for a model on the meta device; `Module.to_empty` alone gives each reader of a tied weight its own."""
    readers: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            readers.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device="cpu")
    for (first, name), *others in readers.values():
        for module, other in others:
            module._parameters[other] = first._parameters[name]


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
    options = {} if told_by_config(model, "use_cache") is None else {"use_cache": False}
    try:
        with _one_text_in_each_row(), _unlogged(logging.getLogger("torch._subclasses.fake_tensor")):
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


@contextlib.contextmanager
def _one_text_in_each_row() -> Iterator[None]:
    """Let transformers need no mask: it looks at values for several texts in a row, and without values makes a mask."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    look = getattr(masks, "find_packed_sequence_indices", None)
    if look is not None:
        masks.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        if look is not None:
            masks.find_packed_sequence_indices = look


@contextlib.contextmanager
def _unlogged(logger: logging.Logger) -> Iterator[None]:
    """Let the error of a shape that does not fit be told once, by who catches it, and not by torch's log before."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _class_of(model: nn.Module) -> str:
    """The name of the model's class before fully_shard."""
    return type(model).__name__.removeprefix("FSDP")
