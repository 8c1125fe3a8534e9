"""All-gather of one weight as FP8 codes, through the hooks that fully_shard offers to a sharded tensor.

    before_gather   this rank's rows, cast under scales that all ranks share, as bytes: no collective takes FP8 on gloo
    after_gather    the codes of the whole weight as a GatheredWeight, which the layer reads without a cast

The sharded parameter stays an ordinary DTensor with an ordinary local tensor, which has the hooks as attributes of the
instance: optimizers, state_dict, clip_grad_norm_ and checkpoints see nothing of it.  Where torch puts a new local
tensor in its place (`to_empty`, `load_state_dict(assign=True)`), `attach` is called again before the next forward.
Source of the protocol: torch.distributed.fsdp, `fsdp_pre_all_gather` and `fsdp_post_all_gather`.
"""

from __future__ import annotations

import typing
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fp8engine import _torch
from fp8engine.autograd.gathered import GatheredWeight, why_not
from fp8engine.distributed.weight_scales import Rows, Shard, WeightScales

HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
BYPASSED = "other code reads the weight and does not call the layer"
SMOOTHED = "fe.smooth multiplies the weight before its cast"


class ShardedWeight:
    """A weight that fully_shard has sharded, and how it is gathered: as codes where its shard has a cast.

    parameter: fully_shard's record of it.  fixed: why it can never be gathered as codes; "" where it can.
    module: that fully_shard gathers it with.  everything: gives the rows of all weights that are gathered as codes.
    """

    module: nn.Module
    everything: Callable[[], Rows]

    def __init__(self, parameter: Any, shard: Shard, scales: WeightScales, fixed: str = ""):
        self.parameter, self.shard, self.scales, self.fixed = parameter, shard, scales, fixed

    def rows(self) -> torch.Tensor:
        """This rank's rows as they would be gathered in high precision, on the device of the computation."""
        rows = _torch.local_tensor(self.parameter.sharded_param).detach()
        return self._in_dtype(rows.to(self.parameter.device, non_blocking=True))

    def reason(self) -> str:
        """Why the weight is gathered in high precision from the next step on; "" for codes."""
        if self.fixed:
            return self.fixed
        numerics = self.shard.numerics
        if numerics.bypassed:
            return BYPASSED
        if numerics.smooth:
            return SMOOTHED
        return why_not(numerics.recipe)

    def follow(self) -> None:
        """A step begins: gather under the recipe of now, until the next one begins."""
        chosen = None if self.reason() else self.shard.numerics.recipe.forward[1]
        if chosen is not self.shard.chosen:
            self.shard.chosen = chosen
            _torch.forget_gathered(self.module, self.parameter)

    def version(self) -> tuple[int, int, int]:
        """Another one after a write to the weight that torch counts; optimizers write some that it does not."""
        whole = self.parameter.sharded_param
        rows = _torch.local_tensor(whole)
        return id(rows), whole._version, rows._version

    def attach(self) -> None:
        """Give the local tensor the hooks, if it has none."""
        rows = _torch.local_tensor(self.parameter.sharded_param)
        if HOOKS[0] not in vars(rows):
            self._attach_to(rows)
            self.parameter._init_extensions()

    def _attach_to(self, rows: torch.Tensor) -> None:
        # A weak reference: a tensor that references itself would be freed by the garbage collector alone.
        me = weakref.ref(rows)
        vars(rows).update(zip(HOOKS, (_BeforeGather(self, me), _AfterGather(self, me)), strict=True))
        if self.parameter.offload_to_cpu:
            vars(rows)["to"] = _Moved(self, me)

    def moved(self, rows: torch.Tensor, *where, **options) -> torch.Tensor:
        """`rows.to(...)` with the hooks, which fully_shard asks of what it has moved to a card."""
        found = torch.Tensor.to(rows, *where, **options)
        if HOOKS[0] not in vars(found):
            self._attach_to(found)
        return found

    def before_gather(self, rows: torch.Tensor) -> tuple[tuple[torch.Tensor], tuple | None]:
        """((what this rank sends,), what `after_gather` is told)."""
        mine = self._in_dtype(rows)
        if self.shard.chosen is None:
            return (self._padded(mine),), None
        found = self.scales.of(self.shard, self.everything)
        codes = self.shard.encode(mine, found.s).view(torch.uint8)
        return (self._padded(codes),), (self.shard.cast, found)

    def after_gather(self, outputs, metadata, param_dtype, *, out=None):
        """(the whole weight, ()), or the scales of `out` made those of the codes that it holds now."""
        (gathered,) = outputs
        whole = gathered[: self.shard.shape[0]]
        if metadata is None:
            return None if out is not None else (whole, ())
        cast, scales = metadata
        if out is None:
            weight = GatheredWeight(whole.view(cast.dtype), scales.scale, cast.granularity, param_dtype)
            weight.power_of_2, weight.layer = cast.power_of_2, self.shard.numerics.name
        else:
            weight = out._local_tensor if hasattr(out, "_local_tensor") else out
            weight._scale, weight.granularity = scales.scale, cast.granularity
        weight.amax, weight.s = scales.amax, scales.smallest
        return (weight, ()) if out is None else None

    def _in_dtype(self, rows: torch.Tensor) -> torch.Tensor:
        dtype = self.parameter.mp_policy.param_dtype
        return rows if dtype is None else rows.to(dtype)

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of an uneven shard, padded with zeros to those of the first rank: all ranks send equally many."""
        short = self.parameter.padded_sharded_param_size[0] - len(rows)
        return torch.nn.functional.pad(rows, (0, 0, 0, short)) if short else rows.contiguous()


class _Hook:
    """An attribute of a tensor that is called, and does not go with the tensor where that is copied or pickled."""

    def __init__(self, weight: ShardedWeight, rows: weakref.ref[torch.Tensor]):
        self.weight, self.reference = weight, rows

    @property
    def rows(self) -> torch.Tensor:
        """The tensor whose attribute it is."""
        return typing.cast(torch.Tensor, self.reference())

    def __deepcopy__(self, memo) -> None:
        return None

    def __reduce__(self):
        return str, ()


class _BeforeGather(_Hook):
    def __call__(self, mesh, outer_size, outer_stride, module, mp_policy):  # five parameters, which fully_shard counts
        return self.weight.before_gather(self.rows)


class _AfterGather(_Hook):
    def __call__(self, outputs, metadata, param_dtype, *, out=None):
        return self.weight.after_gather(outputs, metadata, param_dtype, out=out)


class _Moved(_Hook):
    def __call__(self, *where, **options):
        return self.weight.moved(self.rows, *where, **options)
