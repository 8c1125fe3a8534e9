"""What tests of several ranks share: whole tensors, distances, refusals, and parts that assert on each rank."""

import dataclasses
import re
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import fp8engine as fe
from fp8engine.numerics.recipe import resolve

# Modules in FP32 whose recipes sum in FP32 differ by the order of sums, 2^-24 a number, and now and then by a number
# that such a difference moves over a rounding boundary of FP8, 2^-4 of itself.  Of N numbers near one boundary in 2^4
# about N * 2^-24 * 2^4 / 2^-4 move, an error of sqrt(2^-16) * 2^-4 relative at most.
FLIPS = 2e-4


class Number:
    """A part of a checkpoint that is one number."""

    def __init__(self, value: int):
        self.value = value

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict) -> None:
        self.value = state_dict["value"]


def whole(t: Any) -> Any:
    """A copy of a tensor that ranks may hold parts of."""
    return None if t is None else (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def gradients(model: torch.nn.Module) -> dict[str, Any]:
    """The whole gradient of each parameter."""
    return {name.removeprefix("_orig_mod."): whole(p.grad) for name, p in model.named_parameters()}


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance of a from b in norms."""
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def beyond(found: dict[str, Any], wanted: dict[str, Any], most: float = FLIPS) -> dict[str, float]:
    """Which of the wanted tensors are further away than that, and how far."""
    return {name: far for name in wanted if not (far := error(found[name], wanted[name])) <= most}


def exact(recipe: str | fe.Recipe) -> fe.Recipe:
    """The recipe with sums in FP32: this CPU's own BF16 products round them."""
    return dataclasses.replace(resolve(recipe), output=fe.FP32)


def refusal(call: Callable[[], object]) -> str:
    """ "class: text" of what a call raises; "" of nothing."""
    try:
        call()
    except Exception as refused:
        return f"{type(refused).__name__}: {refused}"
    return ""


def says(told: str, wanted: str) -> bool:
    """Whether a `refusal` is what is wanted: a pattern of its text, of a ParallelError where it names no class."""
    names_class = re.match(r"(\w+Error|UnknownName|UnsupportedDtype): ", wanted)
    return bool(re.match(wanted if names_class else f"ParallelError: .*{wanted}", told, re.DOTALL))


def named(*parts: Callable[..., None]) -> dict[str, Callable[..., None]]:
    """Parts of a test by their names, in words."""
    return {part.__name__.replace("_", " "): part for part in parts}


def outcomes(parts: dict[str, Callable[..., None]], *given: Any) -> dict[str, str]:
    """By a part's name "", or the traceback of what it raised on this rank, with its variables: `run` returns that.

    What comes after a part that does not hold is not run: this rank is not where the others wait for it.
    """
    found = dict.fromkeys(parts, "")
    for name, part in parts.items():
        try:
            part(*given)
        except (Exception, pytest.fail.Exception) as wrong:
            here = wrong.with_traceback(wrong.__traceback__ and wrong.__traceback__.tb_next)
            told = "".join(traceback.TracebackException.from_exception(here, capture_locals=True).format())
            later = list(parts)[list(parts).index(name) + 1 :]
            return found | {name: told} | dict.fromkeys(later, f"not run: {name!r} does not hold\n")
    return found


def work(rank: int, ranks: int, parts: dict[str, Callable[..., None]], *given: Any) -> dict[str, str]:
    """The outcomes of parts(rank, *given) on a rank, which says nothing of what it warns of."""
    warnings.simplefilter("ignore")
    return outcomes(parts, rank, *given)


def holds_on_every_rank(part: str, found: list[dict[str, Any]]) -> None:
    """Fail with what `outcomes` has found of a part, where it does not hold on all ranks."""
    if told := "".join(f"rank {rank}: {of[part]}" for rank, of in enumerate(found) if of[part]):
        pytest.fail(told, pytrace=False)
