"""What `make gpu` will ask of a card, asked of the interpreter: the checks themselves work, and find nothing wrong."""

import pytest
import torch

from benchmarks import checks
from benchmarks.checks import attention, casts, matmuls, smoke
from fp8engine.ops import triton_backend

CPU = torch.device("cpu")
EVERY = [*checks.checks(CPU), *smoke.checks(CPU)]


# NumPy warns on some CPUs where a kernel subtracts Inf from Inf; what is stored is compared bit for bit.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(20)
@pytest.mark.parametrize(("name", "one"), EVERY, ids=[name for name, _ in EVERY])
def test_a_check_finds_nothing_wrong(name: str, one):
    assert one() is None


FAULTS = {
    "a scale too large": lambda y: y * 2,
    "one element": lambda y: y.index_put((torch.tensor([0]), torch.tensor([0])), y[0, 0] + 1),
    "NaN": lambda y: y * float("nan"),
    "another dtype": lambda y: y.double(),
    "rows exchanged": lambda y: y.flip(0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_check_finds_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("matmul", "matmul_fp16"):
        right = getattr(triton_backend, name)
        monkeypatch.setattr(
            triton_backend, name, lambda *args, right=right, **rest: FAULTS[fault](right(*args, **rest))
        )
    shape = (16, 24, 32)
    assert matmuls.integers_fp8(CPU, shape)
    assert matmuls.integers_fp16(CPU, shape)
    assert matmuls.integers_block(CPU, shape)


@pytest.mark.parametrize("part", ["attention", "attention_backward"])
def test_a_check_finds_a_fault_of_attention(part: str, monkeypatch: pytest.MonkeyPatch):
    """One percent too much, of the result or of the last gradient."""
    right = getattr(triton_backend, part)

    def wrong(*args):
        y = right(*args)
        return y * 1.01 if part == "attention" else (*y[:-1], y[-1] * 1.01)

    monkeypatch.setattr(triton_backend, part, wrong)
    assert "apart" in (attention.agrees(CPU, attention.SHAPES[0]) or "")


def test_the_check_of_casts_finds_a_cast_that_hides_infinity(monkeypatch: pytest.MonkeyPatch):
    right = triton_backend.matmul_fp16
    monkeypatch.setattr(triton_backend, "matmul_fp16", lambda a, b, end: right(a.nan_to_num(posinf=1e4), b, end))
    for format in (matmuls.E4M3, matmuls.E5M2):
        assert "inf the first" in (matmuls.rounding(CPU, format) or "")


WRONG_CASTS = {
    "a code": lambda q, scale: (q.view(torch.uint8).bitwise_xor(1).view(q.dtype), scale),
    "a scale, by an ulp": lambda q, scale: (q, scale * (1 + 2.0**-23)),
}


@pytest.mark.parametrize("fault", WRONG_CASTS)
def test_the_check_of_casts_finds_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch):
    right = triton_backend.quantize
    monkeypatch.setattr(triton_backend, "quantize", lambda x, how, slot=None: WRONG_CASTS[fault](*right(x, how, slot)))
    assert casts.casts(CPU, (3, 7))


def test_the_check_of_scale_updates_finds_a_fault(monkeypatch: pytest.MonkeyPatch):
    right = triton_backend.scale_update

    def late(history_HS, live_2S, rules_3S):
        right(history_HS, live_2S, rules_3S)
        live_2S[1, 7] += 1

    monkeypatch.setattr(triton_backend, "scale_update", late)
    assert "live" in (casts.scale_update(CPU) or "")


def _codes(q: torch.Tensor, change) -> torch.Tensor:
    return change(q.view(torch.uint8)).view(q.dtype)


WRONG_PRODUCERS = {  # of (y, (codes, scale)) -> what is said of it
    "a value in 32": (lambda y, q: (y * (1 + 2.0**-5), q), "forward: result 0"),
    "rows exchanged": (lambda y, q: (y.flip(0), q), "forward: result 0"),
    "a code in a row": (lambda y, q: (y, q and (_codes(q[0], lambda codes: codes ^ 1), q[1])), "codes beside"),
    "a scale, by an ulp": (lambda y, q: (y, q and (q[0], q[1] * (1 + 2.0**-23))), "scale of codes beside"),
}


@pytest.mark.parametrize("fault", WRONG_PRODUCERS)
@pytest.mark.parametrize("name", ["norm_quantize", "act_quantize"])
def test_the_checks_of_producers_find_a_fault(name: str, fault: str, monkeypatch: pytest.MonkeyPatch):
    right, (change, said) = getattr(triton_backend, name), WRONG_PRODUCERS[fault]

    def wrong(*args):
        y, q, *rest = right(*args)
        return *change(y, q), *rest

    monkeypatch.setattr(triton_backend, name, wrong)
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
