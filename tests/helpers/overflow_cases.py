"""Models with one planted overflow each, and who is to blame: for the tests of fe.amp.find_overflow.

Every planted part sits in the same net, between healthy layers, so that a victim is always near; `make` chooses what
the net runs under.  A part is FP16 by its own casts where autocast would choose otherwise, and so on every device.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8engine.amp.overflow import find_overflow

WIDTH = 16
in_fp16 = functools.partial(torch.autocast, "cpu", torch.float16)


class Part(nn.Module):
    """A function as a module, which holds these parts."""

    def __init__(self, function: Any, **parts: nn.Module):
        super().__init__()
        self.function: Any = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *given, **named):
        return self.function(*given, **named)


class Times(torch.autograd.Function):
    """x -> x, and its gradient times a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * ctx.factor, None


class Block(nn.Module):
    """Linear, norm, the planted part, a residual; `between` is computed by the block's own forward."""

    def __init__(self, part: nn.Module | None = None, between: Callable | None = None):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.part = part or nn.GELU()
        self.down = nn.Linear(WIDTH, WIDTH)
        self.between = between or (lambda x: x)

    def forward(self, x):
        hidden = self.part(self.norm(self.up(x)))
        return x + self.down(self.between(hidden))


class Net(nn.Module):
    """Three blocks, the planted one in the middle, and a head."""

    def __init__(self, part: nn.Module | None = None, between: Callable | None = None, reentrant: bool | None = None):
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(part, between), Block()])
        self.head = nn.Linear(WIDTH, 4)
        self.reentrant = reentrant
        self.last: Callable = lambda x: x

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.last(x))


@dataclass(frozen=True)
class Case:
    """layer, operand, ops: what is to be found (any of the ops).  scale: of the loss."""

    name: str
    build: Callable[..., Net]
    layer: str | None
    operand: str
    ops: tuple[str, ...] = ()
    scale: float = 1.0
    data: Callable = lambda x: x

    def __str__(self) -> str:
        return self.name


PART = "blocks.1.part"


def forward(name: str, function: Callable, *ops: str) -> Case:
    return Case(name, lambda **how: Net(Part(function), **how), PART, "output", ops)


def backward(name: str, function: Callable, *ops: str, scale: float = 1.0) -> Case:
    return Case(name, lambda **how: Net(Part(function), **how), PART, "grad_input", ops, scale)


def layer(name: str, part: Callable[[], nn.Module], *ops: str) -> Case:
    """The layer in the planted part overflows."""
    return Case(name, lambda **how: Net(part(), **how), f"{PART}.layer", "output", ops)


def between(name: str, function: Callable, operand: str, op: str) -> Case:
    """The forward of the block itself does, between its parts."""
    return Case(name, lambda **how: Net(None, function, **how), "blocks.1", operand, (op,))


def _linear(fill: float) -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        layer.weight.fill_(0.0)
        layer.weight[:, 0] = fill
    return layer


class Positive(nn.Module):
    """Feeds its layer numbers of one sign, so that all its Infs have one sign too."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...] = ()):
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, x):
        y = x.abs() + 1
        return self.layer(y.view(len(y), *self.shape)).reshape(x.shape) if self.shape else self.layer(y)


def _heavy(**how: Any) -> Net:
    """Activations of 2048 and weights of 2^-12: the output is small, and the gradient of the weight is not."""
    part = nn.Sequential(Part(lambda x: torch.ones_like(x) * 2048 + 0 * x), _linear(2.0**-12))
    return Net(part, **how)


def _inf_weight(**how: Any) -> Net:
    net: Any = Net(**how)
    with torch.no_grad():
        net.blocks[1].down.weight[2, 3] = float("inf")
    return net


def _root(**how: Any) -> Net:
    net = Net(**how)
    net.last = lambda x: torch.exp(x.half().abs() + 20)
    return net


def _conv() -> nn.Module:
    layer = nn.Conv1d(1, 1, 3, padding=1)
    nn.init.constant_(layer.weight, 60000.0)
    return layer


def _masked_rows(x):
    return torch.softmax((x @ x.t()).masked_fill(torch.ones(len(x), len(x), dtype=torch.bool), -torch.inf), -1) @ x


FORWARD = [
    forward("matmul", lambda x: (x.half() * 300) @ (x.half() * 300).t() @ x.half(), "mm"),
    forward("exp", lambda x: torch.exp(x.half() + 12), "exp"),
    forward("sum", lambda x: x + (x.half().abs() + 4096).sum(-1, keepdim=True), "sum"),
    forward("division by zero", lambda x: x / (x - x), "div"),
    forward("log of zero", lambda x: -torch.log(torch.relu(x)), "log"),
    forward("softmax of a row masked out", _masked_rows, "_softmax"),
    forward("norm of huge", lambda x: x * (x.half() * 1000).pow(2).sum(-1, keepdim=True).sqrt(), "pow"),
    forward("cast beyond FP16", lambda x: (x.float() * 1e6).half(), "cast to float16"),
    forward("zero times Inf", lambda x: x.new_full(x.shape, torch.inf) * (x - x), "mul"),
    forward("cumsum", lambda x: (x.half().abs() + 8192).cumsum(-1), "cumsum"),
    forward("reciprocal of underflow", lambda x: (x.half() * 1e-8).reciprocal(), "reciprocal"),
    layer("linear", lambda: Positive(_linear(6e4)), "addmm", "mm", "linear"),
    layer("linear, only -Inf", lambda: Positive(_linear(-6e4)), "addmm", "mm", "linear"),
    layer("convolution", lambda: Positive(_conv(), (1, WIDTH)), "convolution", "mkldnn_convolution"),
    between("exp in a container's forward", lambda x: torch.exp(x.half() + 20), "output", "exp"),
    forward("in place", lambda x: x.mul_(2.0**20), "mul_"),
    Case("exp in the model's forward", _root, "", "output", ("exp",)),
    Case("weight is Inf", _inf_weight, "blocks.1.down", "weight"),
    Case("data holds NaN", Net, "", "input", data=lambda x: torch.where(x > 1, torch.nan, x)),
]
BACKWARD = [
    backward("sqrt'(0)", lambda x: torch.sqrt(x * 0) + x, "SqrtBackward0"),
    backward("log'(0) behind where", lambda x: torch.where(x > 99, torch.log(x * 0), x), "LogBackward0"),
    backward("acos'(1)", lambda x: torch.acos(x * 0 + 1) + x, "AcosBackward0"),
    backward("pow'(0)", lambda x: (x * 0).abs().pow(0.5) + x, "PowBackward0"),
    backward("1/x of small", lambda x: 1e-3 / (x.half() * 0 + 1e-3), "ReciprocalBackward0", "DivBackward0", scale=2048),
    backward("scaled up and down", lambda x: (x.half() * 2.0**-10) * 2.0**10, "MulBackward0", scale=2.0**14),
    between("sqrt'(0) in a container's forward", lambda x: torch.sqrt(x * 0) + x, "grad_input", "SqrtBackward0"),
    Case("weight gradient", _heavy, f"{PART}.1", "grad_weight", ("AddmmBackward0", "MmBackward0"), 2.0**12),
    Case("loss scale", Net, None, "grad_output", scale=2.0**30),
]
CASES = FORWARD + BACKWARD
BY_NAME = {case.name: case for case in CASES}
HEALTHY = Case("healthy", Net, None, "")


def make(case: Case, under: str) -> tuple[Any, Any]:
    """(what is called, the net in it).  under: "nothing", "reentrant", "checkpoint" or "compile"."""
    torch.manual_seed(0)
    net = case.build(reentrant={"reentrant": True, "checkpoint": False}.get(under))
    if under != "compile":
        return net, net
    torch._dynamo.reset()
    return torch.compile(net, backend="aot_eager"), net


def step(model: nn.Module, case: Case) -> None:
    """Forward under FP16 autocast and backward of the scaled loss; the weights stay, as when a scaler skips."""
    x = case.data(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))
    with torch.autocast("cpu", torch.float16):
        loss = model(x.requires_grad_()).float().pow(2).mean()
    (loss * case.scale).backward()


def watched(model: nn.Module, x: Any, mode: str = "ops", passes: int = 1, under: Callable = nullcontext) -> Any:
    """A watch of so many passes of x, each under a context: of their backward too, where there is one."""
    with find_overflow(model, mode=mode) as watch:
        for _ in range(passes):
            with under():
                y = model(x)
            if isinstance(y, torch.Tensor) and y.requires_grad:
                y.sum().backward()
                model.zero_grad()
    return watch


def told(watch: Any, *names: str) -> list[tuple]:
    """These fields of each of a watch's findings."""
    watch.first()
    return [tuple(getattr(found, name) for name in names) for found in watch.findings]


def first(watch: Any, *names: str) -> tuple:
    """These fields of a watch's first finding."""
    found = watch.first()
    assert found is not None
    return tuple(getattr(found, name) for name in names)
