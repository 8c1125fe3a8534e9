"""How an emulated matmul ends, against NumPy in float64 and the cast oracle."""

import numpy as np
import pytest
import torch
from casts import E4M3, E5M2

from fp8engine.errors import UnknownName
from fp8engine.ops.reference import KINDS, Epilogue, finish, saturating_cast

FORMULAS = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "srelu": lambda x: np.maximum(x, 0) ** 2,
    "qgelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(torch.from_numpy(x) / 2**0.5).numpy()),
    "gelu_tanh": lambda x: x * 0.5 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def test_the_kinds():
    assert set(KINDS) == set(FORMULAS)
    with pytest.raises(UnknownName, match="activation of a matmul 'gleu'; did you mean 'gelu'"):
        finish(torch.ones(1, 1), Epilogue(activation="gleu"))


@pytest.mark.parametrize("kind", FORMULAS)
def test_bias_activation_and_one_rounding(kind: str):
    y_MN, bias_N = torch.randn(50, 30) * 4, torch.randn(30).bfloat16()
    before = y_MN.clone()
    wanted = FORMULAS[kind](y_MN.double().numpy() + bias_N.double().numpy())
    found = finish(y_MN, Epilogue(bias_N, torch.float32, kind)).double().numpy()
    # The sum is rounded once, a formula's few factors as often: 8 ulp of the larger of result and argument.
    size = np.abs(wanted) + np.abs(y_MN.double().numpy()) + np.abs(bias_N.double().numpy())
    assert (np.abs(found - wanted) <= 8 * 2.0**-24 * size).all()
    for out in (torch.bfloat16, torch.float16):
        assert torch.equal(finish(y_MN, Epilogue(bias_N, out, kind)), torch.from_numpy(found).float().to(out))
    assert torch.equal(y_MN, before)  # the caller's own


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_an_fp8_result_is_cast_under_the_given_scale(dtype):
    y_MN = torch.randn(64, 33) * torch.exp2(torch.randint(-10, 20, (64, 33)))
    y_MN[3, 4], y_MN[5, 6], y_MN[7, 8] = float("nan"), float("inf"), -float("inf")
    amax, counts = torch.tensor([3.0]), torch.tensor([5, 1])
    found = finish(y_MN, Epilogue(None, dtype, "none", torch.tensor(0.25), amax, counts))
    wanted = saturating_cast(y_MN * 4, y_MN, dtype)
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    finite = y_MN[torch.isfinite(y_MN)].abs()
    assert amax.item() == finite.max().item()
    maximum = {E4M3: 448.0, E5M2: 57344.0}[dtype]
    assert counts.tolist() == [5 + int((finite * 4 > maximum).sum()), 1 + 3]


def test_an_amax_only_rises_and_counts_add_up():
    amax, counts = torch.tensor([100.0]), torch.zeros(2, dtype=torch.int64)
    end = Epilogue(None, torch.float16, amax=amax, counts=counts)
    finish(torch.tensor([[1.0, -2.0]]), end)
    assert (amax.item(), counts.tolist()) == (100.0, [0, 0])
    finish(torch.tensor([[70000.0, -1e30]]), end)  # both become Inf in FP16: overflow is counted where it arises
    finish(torch.tensor([[70000.0, float("nan")]]), end)
    assert (amax.item(), counts.tolist()) == (pytest.approx(1e30), [3, 1])
    finish(torch.zeros(0, 5), end)
    assert counts.tolist() == [3, 1]


def test_statistics_one_without_the_other():
    y_MN = torch.tensor([[8.0, float("inf")]])
    amax, counts = torch.zeros(1), torch.zeros(2, dtype=torch.int64)
    finish(y_MN, Epilogue(amax=amax))
    finish(y_MN, Epilogue(counts=counts))
    assert (amax.item(), counts.tolist()) == (8.0, [0, 1])
