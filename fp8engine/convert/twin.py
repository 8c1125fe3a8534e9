"""Twins of modules, which compute what they compute and share nothing with them that a run could change.

A twin has its module's class (under our mixins) and copies of its plain attributes.  It is made on the CPU without the
module's parameters: norms are given new ones, and each linear layer becomes a StandIn of the same width, which holds
no matrix.  So models on the meta device have twins too.  No hook runs on a twin, not even one on all modules.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8engine._torch import TorchDispatchMode, disable_current_modes, divided_parameter, saved_tensors_hooks
from fp8engine.convert.kinds import is_conv1d, is_plain_linear
from fp8engine.errors import ConversionError
from fp8engine.nn.class_swap import Mixin, bound_forwards
from fp8engine.nn.linear import Float8Module

TORCHS = vars(nn.Module()).keys() | {"_modules", "_parameters", "_buffers", "_compiled_call_impl", "forward"}
# Modules that compute in FP32 whatever they are given round each of a handful of steps to 2^-24 of the largest term.
IN_FP32 = 2.0**-20
IN_BACKWARD = 2.0**-18  # their gradients, of a few steps more
IN_16_BITS = 2.0**-5  # a handful of steps, each rounded to 2^-9 in BF16: enough to see a branch, or an eps of the dtype
TOLERANCES = dict.fromkeys((torch.float64, torch.float32), IN_FP32)
TOLERANCES |= dict.fromkeys((torch.bfloat16, torch.float16), IN_16_BITS)
MOST_LAYERS = 3
SHAPES = {2: (-1,), 3: (), 4: (2, 2, -1)}  # of the rows of a look's inputs, by rank; of 3 dimensions they are drawn
STORES = {f"{do}_{what}" for do in ("STORE", "DELETE") for what in ("ATTR", "SUBSCR", "SLICE", "GLOBAL")}
KEEPERS = {"append", "appendleft", "extend", "insert", "setdefault", "update"}  # methods of lists and dicts


class Mode(NamedTuple):
    """How a twin runs: in training or in evaluation, with gradients or without, and its input's dtype.

    autocast: the twin runs under it, and the layers of an MLP's return BF16.
    rank: how many dimensions its inputs have for the twin, whose results must have as many.
    """

    training: bool
    grad: bool = False
    dtype: torch.dtype = torch.float64
    autocast: bool = False
    rank: int = 3

    @property
    def compares_gradients(self) -> bool:
        return self.grad and self.dtype == torch.float64

    def given(self, x: torch.Tensor) -> torch.Tensor:
        """x as an input of a run: in the mode's dtype, within half of its range, with a gradient if it has those.

        But in float64 its last number is NaN.
        """
        top = torch.finfo(self.dtype).max / 2
        x = x.clamp(-top, top).to(self.dtype, copy=True)
        if self.dtype != torch.float64:
            x.view(-1)[-1] = torch.nan
        return x.requires_grad_(self.grad)


class StandIn(nn.Module):
    """In a linear layer's place: returns `wrote` whatever it is given, and keeps that in `read`, and what is `around`.

    Its weight has a shape, a dtype and no memory: code that multiplies by it fails.
    """

    def __init__(self, layer: nn.Module, dtype: torch.dtype = torch.float64):
        super().__init__()
        plain: Any = adapted(layer)
        shape_NK = plain.weight.shape[::-1] if hasattr(plain, "nf") else plain.weight.shape  # a Conv1D's is [K, N]
        self.out_features, self.in_features = self.nf, self.nx = shape_NK
        self.read: list[torch.Tensor] = []
        self.wrote, self.around = torch.empty(0), None
        for key, own in (("weight", plain.weight), ("bias", plain.bias)):
            empty = None if own is None else torch.empty(own.shape, dtype=dtype, device="meta")
            # Not registered: accelerate patches register_parameter.
            self._parameters[key] = None if empty is None else nn.Parameter(empty, requires_grad=False)
        call_without_hooks(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.in_features:
            raise ConversionError("its input has another width")
        self.read.append(x.clone())
        self.around = surroundings()
        return self.wrote.reshape(*x.shape[:-1], self.out_features).clone()


class _NoDraws(TorchDispatchMode):
    """Random numbers are refused before one is drawn: the caller's stay as they were, and dropout is no formula."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            where = kwargs.get("device") or getattr(args[0], "device", "cpu")
            if torch.device(where).type != "meta":  # there none is drawn
                raise ConversionError(f"{func} is random")
        return func(*args, **kwargs)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the caller's modes and autocast, which come back after it, and without gradients."""
    with disable_current_modes(), torch.inference_mode(False), torch.no_grad(), autocast(False):
        yield


@contextlib.contextmanager
def autocast(enabled: bool) -> Iterator[None]:
    """Autocast of twins, to BF16; the code may ask for that of cards, which need not be there, or switch it."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", enabled)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            yield
    finally:
        torch.set_autocast_enabled("cuda", before)


def surroundings() -> tuple:
    """What a module's code may put round a layer that changes what this computes or keeps, and no number of a twin."""
    casts = ((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return *casts, saved_tensors_hooks(False)


def run(twin: nn.Module, mode: Mode, *inputs: torch.Tensor) -> Any:
    """The twin's result, within `quiet`.  Raises what the module's code raises, and where it changes attributes."""
    for part in twin.modules():  # `train` may be the module's own
        part.training = mode.training
    before = _held(twin)
    with _NoDraws(), torch.device(inputs[0].device), torch.set_grad_enabled(mode.grad), autocast(mode.autocast):
        shaped = [x if mode.rank == 3 else x.view(*SHAPES[mode.rank], x.shape[-1]) for x in inputs]
        y = twin(*shaped)
        if mode.rank != 3:
            if y.shape[:-1] != shaped[0].shape[:-1]:
                raise ConversionError("its result has another shape")
            y = y.reshape(*inputs[0].shape[:-1], -1)
    if [*map(id, before)] != [*map(id, _held(twin))]:
        raise ConversionError("its forward keeps what others may read")
    return y


def _held(twin: nn.Module) -> list[Any]:
    """What the parts of a twin have for attributes, and what is in those that are lists, dicts, sets or objects."""
    found: list[Any] = []
    for part in twin.modules():
        for value in () if isinstance(part, StandIn) else vars(part).values():
            inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            found += [value, *(value if isinstance(value, list | set) else inside.values())]
    return found


def pulled(
    y: Sequence[torch.Tensor], dy: Sequence[torch.Tensor], x: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Gradients of x by those of y, results of a run.  Raises where one of x has none."""
    with _NoDraws(), torch.device(y[0].device):
        return torch.autograd.grad(y, x, dy, retain_graph=True)


def codes_of(module: nn.Module) -> set[CodeType]:
    """The code of a module's forward, and of its methods and of functions set on it that this code names."""
    spaces = [vars(module), *(vars(kind) for kind in plain_class(module).__mro__ if kind not in (nn.Module, object))]
    todo: list[Any] = [plain_class(module).forward]
    seen: dict[int, Any] = {}
    while todo:
        each = todo.pop()
        # Of other objects an attribute may be an error: of a dict whose keys are attributes a KeyError.
        if id(each) in seen or not (callable(each) or isinstance(each, CodeType | property | classmethod)):
            continue
        seen[id(each)] = each
        todo.append(getattr(each, {functools.partial: "func", property: "fget"}.get(type(each), "__wrapped__"), None))
        todo += [cell.cell_contents for cell in getattr(each, "__closure__", None) or ()]
        todo.append(getattr(each, "__code__", None))
        if isinstance(each, CodeType):
            todo += [part for part in each.co_consts if isinstance(part, CodeType)]
            todo += [space[name] for name in each.co_names for space in spaces if name in space]
    return {each for each in seen.values() if isinstance(each, CodeType)}


def keeps(module: nn.Module) -> bool:
    """Whether the code of a module or of its parts writes into attributes, elements or globals, or to a list."""
    own = (part for _, part in parts_of(module) if not is_linear(part))
    return any(_writes(code) for part in own for code in codes_of(part))


@functools.cache
def _writes(code: CodeType) -> bool:
    return not KEEPERS.isdisjoint(code.co_names) or any(each.opname in STORES for each in dis.get_instructions(code))


@functools.cache
def dtypes_asked(code: CodeType) -> set[str]:
    """Paths of what the code asks for its dtype: "mlp.wo.weight" of `self.mlp.wo.weight.dtype`, "" of `self.dtype`."""
    asked = (path for path, of_self, name in _attributes(code) if name == "dtype" and (path or of_self))
    return set(map(".".join, asked))  # not of a tensor, `x.dtype`


@functools.cache
def weights_written(code: CodeType) -> set[str]:
    """Paths of weights that the code writes to: "out.weight" of `block.out.weight.div_(2)`, of whatever it names so."""
    called = (path for path, _, name in _attributes(code) if name.endswith("_") and name != "requires_grad_")
    return {".".join(path) for path in called if path[1:] and path[-1] == "weight"}


def _attributes(code: CodeType) -> Iterator[tuple[list[str], bool, str]]:
    """(path before it, whether that begins at `self`, name) of each attribute that the code loads."""
    path, of_self = [], False
    for each in dis.get_instructions(code):
        if each.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            path, of_self = [], each.argrepr.endswith("self")
            continue
        yield path, of_self, each.argval
        path = [*path, each.argval]


def is_linear(module: nn.Module) -> bool:
    """Whether this multiplies by a weight matrix of its own, not stored as codes, perhaps under an adapter of peft."""
    layer: Any = adapted(module)
    ours = isinstance(layer, Float8Module) and hasattr(layer, "as_layer")
    if not (ours or is_conv1d(layer) or is_plain_linear(type(layer))):
        return False
    weight = layer._parameters.get("weight")
    if weight is None or weight.dim() != 2 or layer._buffers or not layer._parameters.keys() <= {"weight", "bias"}:
        return False  # pruned, under spectral_norm or weight_norm
    quantised = type(weight) not in (nn.Parameter, torch.Tensor) and not divided_parameter(layer)
    return weight.is_floating_point() and not quantised


def linear_layers_of(module: nn.Module, *, vectors: bool = False) -> dict[str, nn.Module] | None:
    """The linear layers in a module that has no other parameters and no buffers, by name; None of others.

    vectors: whether it may have parameters of one dimension, such as those of norms.
    """
    found = {}
    for name, part in parts_of(module):
        if name and is_linear(part):
            found[name] = part
        elif part._buffers or any(p is not None and not (vectors and p.dim() == 1) for p in part._parameters.values()):
            return None
        if len(found) > MOST_LAYERS:
            return None
    return found


def parts_of(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and its parts by name, without what is inside linear layers."""
    yield name, module
    if not name or not is_linear(module):
        for key, child in module._modules.items():
            if child is not None:
                yield from parts_of(child, f"{name}.{key}" if name else key)


def adapted(module: nn.Module) -> nn.Module:
    """The layer under peft's adapter, or the layer itself."""
    return getattr(module, "base_layer", module)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class under our mixins."""
    kind = type(module)
    while issubclass(kind, Mixin):
        kind = kind.plain
    return kind


def ones(like: torch.Tensor) -> torch.Tensor | None:
    """What a twin has for a parameter: of a vector ones, of a matrix nothing."""
    return torch.ones(like.shape, dtype=torch.float64, device="cpu") if like.dim() == 1 else None


def twin_of(
    module: nn.Module,
    inside: Mapping[str, nn.Module] | None = None,
    name: str = "",
    fill: Callable[[torch.Tensor], torch.Tensor | None] = ones,
) -> Any:
    """A module's twin.  inside: what stands for its linear layers, by name.  fill: its parameters and buffers.

    Raises ConversionError for a module whose forward is replaced on the instance, and does not say what it replaces:
    accelerate's wrappers do, and change_class puts another forward under them.
    """
    if "forward" in vars(module) and not bound_forwards(module):
        raise ConversionError("its forward is replaced on the instance")
    kind, fresh = plain_class(module), vars(nn.Module())
    twin: Any = object.__new__(kind)
    vars(twin).update(fresh)
    for key, value in own_attributes(module):
        with contextlib.suppress(Exception), _NoTensors():  # a forward that needs what has no copy fails
            vars(twin)[key] = copy.deepcopy(value, {id(module): twin})
    filled = {key: None if p is None else fill(p) for key, p in module._parameters.items()}
    twin._parameters = {key: None if p is None else nn.Parameter(p, requires_grad=False) for key, p in filled.items()}
    twin._buffers = {key: None if b is None else fill(b) for key, b in module._buffers.items()}
    for key, child in module._modules.items():
        path = f"{name}.{key}" if name else key
        known = (inside or {}).get(path)
        twin._modules[key] = known or (None if child is None else twin_of(child, inside, path, fill))
    call_without_hooks(twin)
    return twin


def own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """(name, value) of what a module's class and user have set on it, but parts, parameters, buffers and hooks."""
    return [(key, value) for key, value in list(vars(module).items()) if key not in TORCHS]


def call_without_hooks(module: nn.Module) -> None:
    """Make a call of the module run its forward and nothing else, as if torch.compile had made that."""
    object.__setattr__(module, "_compiled_call_impl", module.forward)


class _NoTensors(TorchDispatchMode):
    """Copies of tensors, and of modules with parameters, are refused: they may be large."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise ConversionError("an attribute holds a tensor")


class Draw:
    """Random numbers of its own, the same in every look."""

    def __init__(self):
        self.generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64, device="cpu")

    def wide(self, *shape: int) -> torch.Tensor:
        """Of either sign, from 0.01 to 10^7: a clamp shows, and every formula differs somewhere."""
        size = torch.rand(*shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return self(*shape).sign() * 10 ** (9 * size - 2)
