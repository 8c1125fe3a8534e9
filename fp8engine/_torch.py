"""Names of a model's parts as they were before wrappers: what `get_submodule` of the model without them finds.

One table says which classes are wrappers, and what each calls the module that it holds.  The class decides, not the
name alone: a model may call a part of its own `module`.
"""

from __future__ import annotations

from torch import nn

HELD_AS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",  # torch.compile
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ActivationWrapper": "_checkpoint_wrapped_module",  # of torch's apply_activation_checkpointing
}
HELD = frozenset(HELD_AS.values())


def plain_name(model: nn.Module, name: str) -> str:
    """The name that a part, a parameter or a buffer of `model` has without the wrappers around the model or its parts.

    >>> plain_name(nn.DataParallel(nn.Sequential(nn.Linear(2, 2))), "module.0.weight")
    '0.weight'
    >>> plain_name(nn.ModuleDict({"module": nn.Linear(2, 2)}), "module.weight")
    'module.weight'
    """
    kept, here = [], model
    for part in name.split("."):
        if part not in HELD or part not in (HELD_AS.get(kind.__name__) for kind in type(here).__mro__):
            kept.append(part)
        child = here._modules.get(part)
        here = here if child is None else child  # a compiled module may refuse to be asked for its truth
    return ".".join(kept)
