"""Iterator over the tensors that an export writes, without a file: what a trainer sends to its rollout engine.

    a layer in FP8       gathered where ranks share it, cast as the next forward casts it, handed out, forgotten
    any other tensor     as it is: the model's own memory, or gathered
    names                those of the files: ties once, and as transformers publishes them

Layers that have one scale (q, k, v under scales per tensor; layers.py) are cast together, as an export casts them.
Where transformers publishes other tensors than a model holds (a mixture's experts one by one), it needs all parts of
such a tensor at once: a whole block is then held instead of a layer.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fp8engine import _torch
from fp8engine.convert.record import RECORD
from fp8engine.convert.select import Decision
from fp8engine.errors import ConversionError
from fp8engine.export.layers import one_scale, unsmoothed
from fp8engine.export.layout import Stored
from fp8engine.export.write import check_model, quantised, settle
from fp8engine.nn.linear import Float8Module

BLOCK = re.compile(r".*?\.\d+\.")  # of a name, up to the number of its block


def iter_fp8(model: nn.Module, *, layout: str = "auto") -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of everything that `export(model, path, layout=layout)` would write, bit for bit, without a file.

    For a layer in FP8 its codes `<layer>.weight` [N, K] and their FP32 scale (`<layer>.weight_scale`, or
    `weight_scale_inv` over blocks; a byte each under "mxfp8"); other tensors in the model's dtype.  Tensors are on the
    model's device; those not in FP8 are the parameters' own memory, so copy what must outlive the next optimizer step.
    With layout="fp8engine" the codes are those that the next forward multiplies, but for `delayed`, whose scale comes
    from its history, and layers under fe.smooth, which is left out with a warning; other layouts differ where servers
    ask for it (layers.py).
    Under FSDP2 each tensor is gathered when it comes, in the dtype that mp_policy gives the forward: every rank must go
    through all pairs.  Between two pairs nothing may change the weights or run the model.

    Raises ConversionError, before the first pair, for a model that is not converted (which has no codes of training)
    and for what `export` refuses; UnknownName for a layout; StateError at a layer whose weight is not finite.

    >>> import transformers, warnings
    >>> from fp8engine.convert.swap import convert
    >>> size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, num_attention_heads=2))
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")  # this CPU has no FP8 Tensor Cores
    ...     model = convert(model, "rowwise")
    >>> tensors = dict(iter_fp8(model))
    >>> for name in ("mlp.up_proj.weight", "mlp.up_proj.weight_scale", "input_layernorm.weight"):
    ...     print(tensors[f"model.layers.0.{name}"].dtype, list(tensors[f"model.layers.0.{name}"].shape))
    torch.float8_e4m3fn [64, 32]
    torch.float32 [64, 1]
    torch.float32 [32]
    """
    check_model(model)
    if not any(isinstance(module, Float8Module) for module in model.modules()) and not hasattr(model, RECORD):
        raise ConversionError(
            f"iter_fp8: {type(model).__name__} is not converted, so it trains with no FP8 codes: call fe.convert "
            "first, or fe.hf.export for a checkpoint of a plain model"
        )
    stored, decisions, _ = settle(model, None, layout, "dynamic")
    chosen = [decision for decision in decisions if decision.recipe is not None]
    for note in unsmoothed(chosen):
        warnings.warn(f"iter_fp8: {note}", stacklevel=2)
    return _pairs(model, stored, chosen)


def _pairs(model: Any, stored: Stored, chosen: list[Decision]) -> Iterator[tuple[str, torch.Tensor]]:
    from transformers.core_model_loading import revert_weight_conversion

    nothing: dict[str, torch.Tensor] = {}
    as_held = revert_weight_conversion(model, nothing) is nothing  # a copy where transformers converts the model
    groups = {f"{d.name}.weight": group for group in one_scale(chosen, stored.layout) for d in group}
    state = model.state_dict()  # under FSDP2 shards again what a forward has gathered
    names, dtypes = _saved(model, state, set(groups)), _dtypes(model, state)
    whole = lambda name: _gathered(state[name], dtypes.get(name))  # noqa: E731 - two uses
    for _, block in itertools.groupby(names, key=lambda name: name if as_held else _block(name)):
        made: dict[str, torch.Tensor] = {}
        for name in block:
            if name not in groups:
                made[name] = whole(name).contiguous()
            elif name == f"{groups[name][0].name}.weight":  # the others of its group come with it
                made |= quantised(groups[name], whole, stored)
        yield from (made if as_held else revert_weight_conversion(model, made)).items()


def _saved(model, state: Mapping[str, torch.Tensor], fp8: set[str]) -> list[str]:
    """Names of the state that transformers' save_pretrained writes: what it ignores is left out, and ties come once.

    Ties are found by addresses, for which torch would gather a tied shard, and fails where it is uneven: a tensor
    without data stands in for a shard, and is told apart by its parameter.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = set(model._keys_to_ignore_on_save or ())
    others = {
        name: torch.empty(tensor.shape, device="meta") if _sharded(tensor) else tensor
        for name, tensor in state.items()
        if name not in fp8 and name not in ignored
    }
    kept = remove_tied_weights_from_state_dict(others, model)
    return [name for name in state if name in fp8 or name in kept]


def _block(name: str) -> str:
    found = BLOCK.match(name)
    return found.group() if found else ""


def _sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor; asked so, because its import takes torch a second."""
    return hasattr(tensor, "full_tensor")


def _dtypes(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
    """The dtype to which fully_shard's mp_policy casts parameters for the forward, by name, where it does."""
    if not any(map(_sharded, state.values())):
        return {}
    from torch.distributed.fsdp import FSDPModule

    records = (r for m in model.modules() if isinstance(m, FSDPModule) for r in _torch.sharded_parameters(m))
    found = {id(r.sharded_param): r.mp_policy.param_dtype for r in records if r.mp_policy.param_dtype is not None}
    named = model.named_parameters(remove_duplicate=False)
    return {name: found[id(parameter)] for name, parameter in named if id(parameter) in found}


def _gathered(tensor: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """The whole of a tensor; one that is sharded in `dtype`, and on the device that its ranks compute on."""
    return tensor.to(tensor.device_mesh.device_type, dtype).full_tensor() if _sharded(tensor) else tensor
