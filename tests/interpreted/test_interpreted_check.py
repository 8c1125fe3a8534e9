"""What `make gpu` will ask of a card, asked of the interpreter: the checks themselves work, and find nothing wrong."""

from collections.abc import Callable

import pytest
import torch

from benchmarks import checks
from benchmarks.checks import attention, casts, matmuls, smoke
from fp8engine.ops import triton_backend

CPU = torch.device("cpu")
EVERY = [*checks.checks(CPU), *smoke.checks(CPU)]
SLOWEST = "activations 5x256, forward and backward"  # a minute; test_interpreted_act.py has each activation


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(14)
@pytest.mark.parametrize(
    ("name", "one"),
    [pytest.param(*each, marks=[pytest.mark.nightly] if each[0] == SLOWEST else [], id=each[0]) for each in EVERY],
)
def test_a_check_finds_nothing_wrong(name: str, one):
    assert one() is None


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch):
    """A function that gives an operation of the triton backend a fault: `wrong` of its result and arguments."""

    def spoil(operation: str, wrong: Callable) -> None:
        right = getattr(triton_backend, operation)
        monkeypatch.setattr(triton_backend, operation, lambda *given: wrong(right(*given), *given))

    return spoil


FAULTS = {
    "a scale too large": lambda y: y * 2,
    "one element": lambda y: y.index_put((torch.tensor([0]), torch.tensor([0])), y[0, 0] + 1),
    "NaN": lambda y: y * float("nan"),
    "another dtype": lambda y: y.double(),
    "rows exchanged": lambda y: y.flip(0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_check_finds_a_fault(fault: str, spoiled):
    for name in ("matmul", "matmul_fp16"):
        spoiled(name, lambda y, *given: FAULTS[fault](y))
    for check in (matmuls.integers_fp8, matmuls.integers_fp16, matmuls.integers_block):
        assert check(CPU, (16, 24, 32))


@pytest.mark.parametrize(
    ("part", "by_a_percent"),
    [
        ("attention", lambda y, *given: y * 1.01),
        ("attention_backward", lambda found, *given: (*found[:-1], found[-1] * 1.01)),
    ],
)
def test_a_check_finds_a_fault_of_attention(part: str, by_a_percent, spoiled):
    spoiled(part, by_a_percent)
    assert "apart" in (attention.agrees(CPU, attention.SHAPES[0]) or "")


def test_the_check_of_casts_finds_a_cast_that_hides_infinity(monkeypatch: pytest.MonkeyPatch):
    right = triton_backend.matmul_fp16
    monkeypatch.setattr(triton_backend, "matmul_fp16", lambda a, b, end: right(a.nan_to_num(posinf=1e4), b, end))
    for format in (matmuls.E4M3, matmuls.E5M2):
        assert "inf the first" in (matmuls.rounding(CPU, format) or "")


def other_codes(q: torch.Tensor) -> torch.Tensor:
    return (q.view(torch.uint8) ^ 1).view(q.dtype)


WRONG_CASTS = {
    "a code": lambda found, *given: (other_codes(found[0]), found[1]),
    "a scale, by an ulp": lambda found, *given: (found[0], found[1] * (1 + 2.0**-23)),
}


@pytest.mark.parametrize("fault", WRONG_CASTS)
def test_the_check_of_casts_finds_a_fault(fault: str, spoiled):
    spoiled("quantize", WRONG_CASTS[fault])
    assert casts.casts(CPU, (3, 7))


def test_the_check_of_scale_updates_finds_a_fault(spoiled):
    spoiled("scale_update", lambda nothing, history_HS, live_2S, rules_3S: live_2S[1, 7].add_(1))
    assert "live" in (casts.scale_update(CPU) or "")


WRONG_PRODUCERS = {  # of (y, (codes, scale)) -> what is said of it
    "a value in 32": (lambda y, q: (y * (1 + 2.0**-5), q), "forward: result 0"),
    "rows exchanged": (lambda y, q: (y.flip(0), q), "forward: result 0"),
    "a code in a row": (lambda y, q: (y, q and (other_codes(q[0]), q[1])), "codes beside"),
    "a scale, by an ulp": (lambda y, q: (y, q and (q[0], q[1] * (1 + 2.0**-23))), "scale of codes beside"),
}


@pytest.mark.parametrize("fault", WRONG_PRODUCERS)
@pytest.mark.parametrize("name", ["norm_quantize", "act_quantize"])
def test_the_checks_of_producers_find_a_fault(name: str, fault: str, spoiled):
    change, said = WRONG_PRODUCERS[fault]
    spoiled(name, lambda found, *given: (*change(*found[:2]), *found[2:]))
    one = casts.norms if name == "norm_quantize" else casts.activations
    assert said in (one(CPU, (5, 256)) or "")


def test_the_checks_of_producers_find_a_call_that_is_not_counted(monkeypatch: pytest.MonkeyPatch):
    right = triton_backend.norm_quantize

    def silent(x_MK, weight_K, bias_K, norm, to):
        return right(x_MK, weight_K, bias_K, norm, to._replace(slot=to.slot and to.slot._replace(count=False)))

    monkeypatch.setattr(triton_backend, "norm_quantize", silent)
    assert "counts, of codes beside the result" in (casts.norms(CPU, (5, 256)) or "")


def test_the_check_of_sums_finds_a_row_left_out(monkeypatch: pytest.MonkeyPatch):
    right = triton_backend.cast_transpose

    def short(x_MK, how, slot=None, sums=False):
        *both, sums_K = right(x_MK, how, slot, True)
        return (*both, sums_K - x_MK[-1].float()) if sums else tuple(both)

    monkeypatch.setattr(triton_backend, "cast_transpose", short)
    assert "times the bound" in (casts.column_sums(CPU, (3, 7)) or "")
