"""Who adds a bias on a card: the matmul to its FP32 sums, wherever one can, and no pass of its own over the result."""

from typing import Any

import pytest
import torch

from fp8engine import _torch
from fp8engine.numerics.cards import H200
from fp8engine.numerics.recipe import blockwise, current, rowwise
from fp8engine.ops import cost, device, launches, matmul, scaled_mm, triton_backend
from fp8engine.ops.cost import Setting
from fp8engine.ops.reference import Operand

CARD, E4M3 = torch.device("cuda", 0), torch.float8_e4m3fn
LARGE = (8192, 14336, 4096)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list:
    """Biases that torch's scaled matmul is given on a pretended card, which computes on the CPU."""
    biases = []

    def multiply(a, b, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False):
        biases.append(bias)
        y_MN = a.float() @ b.float() * scale_a * scale_b
        return (y_MN if bias is None else y_MN + bias.float()).to(out_dtype)

    monkeypatch.setattr(_torch, "scaled_mm", multiply)
    monkeypatch.setattr(device, "has_fp8", lambda where: True)
    return biases


def operand(rows: int, k: int, by_row: bool) -> Operand:
    codes = torch.randint(-8, 9, (rows, k)).to(E4M3)
    return Operand(codes, torch.ones(rows, 1), rows=1) if by_row else Operand(codes, torch.tensor(0.5))


@pytest.mark.short
@pytest.mark.parametrize("by_row", [False, True], ids=["per tensor", "per row"])
def test_a_bias_of_fp32_is_rounded_and_added_to_the_sums(given: list, by_row: bool):
    a, b, bias_N = operand(5, 32, by_row), operand(16, 32, by_row), torch.randn(16)
    y_MN = scaled_mm.matmul(a, b, bias_N, torch.bfloat16)
    exact = (a.data.double() * a.scale) @ (b.data.double() * b.scale).t() + bias_N.bfloat16().double()
    assert torch.equal(y_MN, exact.bfloat16())  # sums of small integers are exact: one rounding, that of the result
    assert [bias.dtype for bias in given] == [torch.bfloat16]


@pytest.mark.parametrize(
    ("n", "out"), [(16, torch.float32), (21, torch.bfloat16)], ids=["an FP32 result", "a padded N"]
)
def test_where_torch_adds_none_the_bias_keeps_its_digits(given: list, n: int, out: torch.dtype):
    a, b, bias_N = operand(5, 32, False), operand(n, 32, False), torch.randn(n)
    y_MN = scaled_mm.matmul(a, b, bias_N, out)
    sums = ((a.data.double() * a.scale) @ (b.data.double() * b.scale).t()).to(out)
    assert torch.equal(y_MN, (sums + bias_N).to(out))
    assert given == [None]


@pytest.mark.parametrize(
    ("usable", "torch_can", "ratio", "k", "bias", "chosen"),
    [
        (True, True, 0.0, None, False, "triton"),  # nobody measured it
        (True, True, 1.1, None, False, "triton"),
        (True, True, 0.94, 4096, False, "cublas"),
        (True, True, 0.94, 4096, True, "triton"),  # torch's pass for the bias takes 1632 / K of its matmul's time
        (True, True, 0.94, 65536, True, "cublas"),
        (True, True, 0.94, None, True, "cublas"),
        (True, False, 0.94, 4096, False, "triton"),
        (False, True, 0.0, None, False, "cublas"),
        (False, False, 0.0, None, False, "reference"),
    ],
)
def test_which_backend_multiplies_blocks(monkeypatch, usable, torch_can, ratio, k, bias, chosen):
    monkeypatch.setattr(device, "has_fp8", lambda where: True)
    monkeypatch.setattr(device, "capability", lambda where: (9, 0))
    monkeypatch.setattr(triton_backend, "usable", lambda: usable)
    monkeypatch.setattr(triton_backend, "measured", lambda *asked: ratio)
    monkeypatch.setattr(scaled_mm, "no_blocks", lambda where: None if torch_can else "no")
    shape: Any = LARGE[:2] if k is None else (*LARGE[:2], k)
    assert matmul.choose(CARD, True, shape, kind="block", bias=bias) == chosen
    if usable:  # of other blocks than those of 128, which have no kind, nothing was measured
        assert matmul.choose(CARD, True, shape, kind=None, bias=bias) == "triton"
    if k:
        assert matmul.choose(CARD, False, shape, kind="tensor", bias=bias) == "cublas"  # it adds the bias itself
        why = matmul.why_chosen(CARD, shape, "fast", "block", chosen)
        assert why.startswith("kernels/tuning.json: our kernel runs 0.94 times as fast as torch's")
        assert ("the bias by a pass of its own" in why) == (chosen == "triton" and torch_can)
        assert why.endswith("as fast as torch's, which has no such blocks") == (not torch_can)


@pytest.mark.parametrize("recipe", [blockwise(), current(), rowwise()], ids=lambda recipe: recipe.name)
def test_the_predicted_step_has_no_pass_for_a_bias(recipe):
    with_bias, without = (cost.layer_time(recipe, *LARGE, H200, Setting(bias=bias)) for bias in (True, False))
    ours = tuple(name for name in ("forward",) if cost.dispatched(recipe, name, LARGE, bias=True))
    step = launches.Step(recipe, *LARGE, bias=True, ours=ours)
    assert "torch add" not in [launch.kernel for launch in launches.forward(step)]
    # What remains is the bias's gradient, and that our matmul takes up to 1 / 0.9 of torch's time.
    assert without.fp8 < with_bias.fp8 < 1.12 * without.fp8
