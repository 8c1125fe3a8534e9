"""Description of fully_shard's all-gathers of converted weights, for reports: their form, its reason, their bytes."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from torch import nn

from fp8engine import _torch
from fp8engine.distributed.sharded_weight import never_as_codes, not_as_codes, numerics_of

GATHER = "_fp8engine_gather"  # attribute of a root that `fsdp` was called on
ASKED = "fully_shard was called, not fe.distributed.fsdp"


@dataclass(frozen=True)
class Gathered:
    """How one weight is gathered.

    why: why in high precision, "" for FP8 codes.  sent: bytes that a rank sends in one gather.  plain: those of a
    gather in high precision.  codes: those of a gather as codes; `plain` where codes cannot stand for the weight.
    """

    why: str
    sent: int
    plain: int
    codes: int


def gathers(model: nn.Module) -> dict[tuple[int, str], Gathered]:
    """By (id of the layer, name of its parameter), the weights of converted layers that fully_shard has sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded where nobody has imported it
    if fsdp is None:
        return {}
    ours = {id(each) for m in model.modules() if GATHER in vars(m) for _, each in vars(m)[GATHER].parameters}
    found = {}
    for module in model.modules():
        for parameter in _torch.sharded_parameters(module) if isinstance(module, fsdp.FSDPModule) else ():
            if (numerics := numerics_of(parameter)) is not None:
                dtype: torch.dtype = parameter.mp_policy.param_dtype or parameter.sharded_param.dtype
                others = parameter.shard_mesh_from_root.size() - 1
                elements = math.prod(parameter.padded_sharded_param_size) * others
                cannot = never_as_codes(parameter) or not_as_codes(numerics)
                why = cannot if id(parameter) in ours else ASKED
                plain, owner = elements * dtype.itemsize, parameter._module_info
                gathered = Gathered(why, plain if why else elements, plain, plain if cannot else elements)
                found[id(owner.module), owner.param_name] = gathered
    return found


def totals(found: dict[tuple[int, str], Gathered]) -> dict | None:
    """Sums for a report, of one gather of every weight and rank; None where nothing is sharded."""
    if not found:
        return None
    each = list(found.values())
    return {
        "weights": len(each),
        "as_codes": sum(not gathered.why for gathered in each),
        "sent_bytes": sum(gathered.sent for gathered in each),
        "high_precision_bytes": sum(gathered.plain for gathered in each),
        "as_codes_bytes": sum(gathered.codes for gathered in each),
    }
