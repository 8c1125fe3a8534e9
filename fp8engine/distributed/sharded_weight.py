"""All-gather of one weight as FP8 codes, through the hooks that fully_shard offers to a sharded tensor.

    before_gather   this rank's rows, cast under scales that all ranks share, as bytes: no collective takes FP8 on gloo
    after_gather    the codes of the whole weight as a GatheredWeight, which the layer reads without a cast

The sharded parameter stays an ordinary DTensor with an ordinary local tensor, which has the hooks as attributes of the
instance: optimizers, state_dict, clip_grad_norm_ and checkpoints see nothing of it.  Where torch puts a new local
tensor in its place (`to_empty`, `load_state_dict(assign=True)`), `attach` is called again before the next forward.
Source of the protocol: torch.distributed.fsdp, `fsdp_pre_all_gather` and `fsdp_post_all_gather`.
"""

from __future__ import annotations

import functools
import math
import typing
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from fp8engine import _torch
from fp8engine.autograd.gathered import GatheredWeight, why_not
from fp8engine.autograd.numerics import Numerics
from fp8engine.nn.linear import Float8Module
from fp8engine.numerics.cast import Cast
from fp8engine.ops import casts
from fp8engine.ops.reference.quantize import largest

HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
EXPERTS = "it holds the weights of several experts, which fe.distributed.ExpertParallel divides instead"


def numerics_of(parameter: Any) -> Numerics | None:
    """The numerics of the matmuls by a parameter of fully_shard; None for what is no weight of a converted layer."""
    owner = parameter._module_info
    return owner.module.numerics_of(owner.param_name) if isinstance(owner.module, Float8Module) else None


def never_as_codes(parameter: Any) -> str:
    """Why a weight is gathered in high precision under every recipe; "" where it need not be."""
    if parameter._module_info.shared_modules:
        return "other modules read the same weight"
    if len(parameter._orig_size) != 2:
        return EXPERTS
    dim = parameter.fsdp_placement.dim
    return f"it is sharded along dimension {dim}" if dim else ""


def not_as_codes(numerics: Numerics) -> str:
    """Why a layer's weight is gathered in high precision from the next step on; "" for codes."""
    if numerics.bypassed:
        return "other code reads the weight and does not call the layer"
    if numerics.smooth:
        return "fe.smooth multiplies the weight before its cast"
    return why_not(numerics.recipe)


@dataclass(eq=False)
class Scales:
    """Of one weight: amax of the whole, the smallest s (NaN where it is predicted); s and 1 / s of each group."""

    amax: torch.Tensor
    smallest: torch.Tensor
    s: torch.Tensor
    scale: torch.Tensor


class ShardedWeight:
    """This rank's rows of a weight that fully_shard has sharded, which codes can stand for, and how they are gathered.

    module: that fully_shard gathers it with.  parameter: fully_shard's record of it.  numerics: of its layer.
    shape: of the whole parameter.  first: index of this rank's first row.  transposed: the layer multiplies by the
    parameter's transpose (Conv1D).  chosen: the cast under which it is gathered in this step; None in high precision.
    scales_of: gives the scales of a weight, which all ranks share.
    """

    def __init__(
        self, module: nn.Module, parameter: Any, numerics: Numerics, scales_of: Callable[[ShardedWeight], Scales]
    ):
        self.module, self.parameter, self.numerics, self.scales_of = module, parameter, numerics, scales_of
        self.shape = n, _ = tuple(parameter._orig_size)
        self.first = min(parameter.padded_sharded_param_size[0] * parameter.shard_mesh_from_root.get_local_rank(), n)
        self.transposed: bool = parameter._module_info.module.transposed
        self.chosen: Cast | None = None
        self.attach()

    @property
    def cast(self) -> Cast:
        """The cast in the parameter's own coordinates."""
        cast = typing.cast(Cast, self.chosen)
        return cast.t() if self.transposed else cast

    @property
    def groups(self) -> tuple[int, int]:
        """(down, across): the groups of the whole weight that have a scale each."""
        down, across = self.cast.scale_shape(*self.shape) or (1, 1)
        return down, across

    @property
    def first_group(self) -> int:
        """Index of the group, counted down the weight, that this rank's first row is in."""
        return 0 if self.cast.rows == -1 else self.first // self.cast.rows

    def rows(self) -> torch.Tensor:
        """This rank's rows as they would be gathered in high precision, on the device of the computation."""
        rows = _torch.local_tensor(self.parameter.sharded_param).detach()
        return self._in_dtype(rows.to(self.parameter.device, non_blocking=True))

    def among_zeros(self) -> torch.Tensor:
        """The weight [N, K] as its layer reads it, with zeros for the rows of other ranks."""
        rows = self.rows()
        whole = rows.new_zeros(self.shape)
        whole[self.first : self.first + len(rows)] = rows
        return whole.t() if self.transposed else whole

    def amax(self, rows: torch.Tensor) -> torch.Tensor:
        """max |w| of every group that these rows [R, K] have a part of, FP32 [groups down, groups across]."""
        padded = self._from_whole_group(rows)
        if type(rows) is torch.Tensor and rows.device.type == "cpu":  # elsewhere the host would wait for the answer
            found = largest(padded, self.cast)
            if bool(torch.isfinite(found).all()):
                return found
        return largest(torch.nan_to_num(padded, 0.0, 0.0, 0.0), self.cast)

    def encode(self, rows: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """FP8 codes of these rows; s: of all groups of the weight, in `cast.scale_shape`."""
        cast = self.cast
        if cast.rows == -1:
            return casts.encode(rows, cast, s)
        padded = self._from_whole_group(rows)
        mine = s[self.first_group : self.first_group + math.ceil(len(padded) / cast.rows)]
        return casts.encode(padded, cast, mine)[len(padded) - len(rows) :]

    def follow(self) -> None:
        """A step begins: gather under the recipe of now, until the next one begins."""
        chosen = None if not_as_codes(self.numerics) else self.numerics.recipe.forward[1]
        if chosen is not self.chosen:
            self.chosen = chosen
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
        vars(rows).update(zip(HOOKS, (_Hook(self.before_gather, me), _Hook(self.after_gather)), strict=True))
        if self.parameter.offload_to_cpu:
            vars(rows)["to"] = _Hook(self.moved, me)

    def moved(self, rows: Any, *where, **options) -> torch.Tensor:
        """`rows.to(...)` with the hooks, which fully_shard asks of what it has moved to a card."""
        found = torch.Tensor.to(rows(), *where, **options)
        if HOOKS[0] not in vars(found):
            self._attach_to(found)
        return found

    def before_gather(self, rows: Any, mesh, outer_size, outer_stride, module, mp_policy):
        """((what this rank sends,), what `after_gather` is told).  fully_shard counts the five last parameters."""
        mine = self._in_dtype(rows())
        if self.chosen is None:
            return (self._padded(mine),), None
        found = self.scales_of(self)
        codes = self.encode(mine, found.s).view(torch.uint8)
        return (self._padded(codes),), (self.cast, found)

    def after_gather(self, outputs, metadata, param_dtype, *, out=None):
        """(the whole weight, ()), or the scales of `out` made those of the codes that it holds now."""
        (gathered,) = outputs
        whole = gathered[: self.shape[0]]
        if metadata is None:
            return None if out is not None else (whole, ())
        cast, scales = metadata
        if out is None:
            weight = GatheredWeight(whole.view(cast.dtype), scales.scale, cast.granularity, param_dtype)
            weight.power_of_2, weight.layer = cast.power_of_2, self.numerics.name
        else:
            weight = out._local_tensor if hasattr(out, "_local_tensor") else out
            weight._scale, weight.granularity = scales.scale, cast.granularity
        weight.amax, weight.s = scales.amax, scales.smallest
        return (weight, ()) if out is None else None

    def _in_dtype(self, rows: torch.Tensor) -> torch.Tensor:
        dtype = self.parameter.mp_policy.param_dtype
        return rows if dtype is None else rows.to(dtype)

    def _from_whole_group(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows with zeros above them up to the first row of their group."""
        above = self.first % self.cast.rows if self.cast.rows != -1 else 0
        return pad(rows, (0, 0, above, 0)) if above else rows

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of an uneven shard, padded with zeros to those of the first rank: all ranks send equally many."""
        short = self.parameter.padded_sharded_param_size[0] - len(rows)
        return pad(rows, (0, 0, 0, short)) if short else rows.contiguous()


class _Hook(functools.partial):
    """An attribute of a tensor that is called, and does not go with the tensor where that is copied or pickled."""

    def __deepcopy__(self, memo) -> None:
        return None

    def __reduce__(self):
        return str, ()
