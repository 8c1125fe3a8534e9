"""Old paths of modules that have moved into rooms: kept for release 0.2, with a warning, then deleted.

Each old path is an entry of `sys.modules` that loads the module it became when it is first asked for a name.  So
`from fp8engine.recipe import Recipe` still works, and a pickle that names `fp8engine.modules.linear.Linear` loads.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

# Room of today: the modules that moved into it, as "old" or "old=new" where the name changed too.
SINGLE = {
    "": "names=_torch",
    "auto": "controller.arriving=host_copy policy policy_output=outputs",
    "convert": "describe fuse select modules.first_forward=bypassed modules.torch_transformer=bypassed",
    "export": "hf",
    "nn": (
        "families modules.changed=linear modules.dispatched=class_swap modules.mixed=class_swap "
        "modules.serving_conv1d=conv1d"
    ),
    "numerics": "cast cost formats recipe",
    "ops": (
        "cublas=scaled_mm device dispatch=backends execute=matmul fingerprint native=triton_backend operators=library "
        "producers=norm_act ranks run_producers=ways tensor"
    ),
    "scaling": "choice observe=sample output_slots prediction shared_input stats=histogram",
}
# Old folder: the room that it became, and the modules in it.
FOLDERS = {
    "controller": ("auto", "alarm controller history log outputs saving"),
    "flow": ("auto.flow", "draw fold kinds layout origins record result rules untouched"),
    "functional": (
        "autograd",
        (
            "attention call grouped groups linear mlp norm norm_linear numerics parts ready refusals stored "
            "stored_tensor transforms weight"
        ),
    ),
    "modules": (
        "nn",
        "attention conv1d experts grouped hf_block layernorm_linear layernorm_mlp lazy linear serving transformer",
    ),
    "reference": (
        "ops.reference",
        "act_quantize cast_transpose epilogue matmul norm_quantize operand quantize rounding scale",
    ),
}
SILENT = ("hf", "flow")  # fe.hf and fe.flow are public names: their dotted paths stay


class MovedModule(ModuleType):
    """A module under its old name: any name asked of it is that of the module it became.

    Raises AttributeError for a name that the new module does not have either.
    """

    def __init__(self, old: str, new: str):
        super().__init__(old, f"Moved to {new}.")
        self.__path__ = []  # a package: its old submodules are entries of their own
        self._new = new

    def __getattr__(self, name: str):
        if name.startswith("__"):  # asked by the import system, by pickle's and inspect's walks over sys.modules
            raise AttributeError(name)
        found = getattr(import_module(self._new), name)
        if self.__name__.removeprefix("fp8engine.") not in SILENT:
            message = f"{self.__name__} has moved to {self._new}; the old path goes with release 0.3"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        return found


def moved() -> dict[str, str]:
    """Old dotted path -> today's, both below fp8engine."""
    found = {}
    for room, names in SINGLE.items():
        for old, _, new in (entry.partition("=") for entry in names.split()):
            found[old] = f"{room}.{new or old}".removeprefix(".")
    for old, (room, names) in FOLDERS.items():
        found[old] = room
        found.update({f"{old}.{name}": f"{room}.{name}" for name in names.split()})
    return found


def renamed(state: Mapping, names: Mapping[str, str]) -> dict:
    """The attributes of a pickled object under today's names.  names: old -> new.

    >>> renamed({"late": 1, "step": 2}, {"late": "steps_without_backward"})
    {'steps_without_backward': 1, 'step': 2}
    """
    return {names.get(key, key): value for key, value in state.items()}


def register() -> None:
    """Enter every old path into sys.modules; loads nothing."""
    for old, new in moved().items():
        path = f"fp8engine.{old}"
        alias = sys.modules.setdefault(path, MovedModule(path, f"fp8engine.{new}"))
        if "." not in old and not hasattr(sys.modules["fp8engine"], old):
            setattr(sys.modules["fp8engine"], old, alias)  # for `import fp8engine.recipe; fp8engine.recipe.Recipe`
