"""FP16 products are summed in FP32: a dot product of 16,384 terms, whatever multiplies it.

    |y - exact| <= (K - 1) 2^-24 sum |a b|      FP32 sums in any order (Higham 2002, section 4.2; products are exact)
                 + 2^-11 |y|                    one rounding to FP16

Sums in FP16 would stop at 2048, where adding 1 rounds away.
"""

import pytest
import torch

import fp8engine as fe
from fp8engine.ops import matmul

K = 16384


def check(multiply) -> None:
    ones_K = torch.ones(1, K, dtype=torch.float16)
    assert multiply(ones_K, ones_K).item() == K
    # Large terms first, then many that each vanish beside them in FP16 and together do not.
    a_MK = torch.full((2, K), 2.0**-5, dtype=torch.float16)
    a_MK[:, 0] = 1024.0
    exact = 1024.0 + (K - 1) * 2.0**-5
    bound = (K - 1) * 2.0**-24 * exact + 2.0**-11 * exact
    assert (multiply(a_MK, ones_K).double() - exact).abs().max().item() <= bound
    generator = torch.Generator().manual_seed(0)
    a_MK, b_NK = (torch.randn(rows, K, generator=generator).half() for rows in (3, 5))
    exact_MN = a_MK.double() @ b_NK.double().t()
    magnitude_MN = a_MK.double().abs() @ b_NK.double().abs().t()
    error_MN = (multiply(a_MK, b_NK).double() - exact_MN).abs()
    assert (error_MN <= (K - 1) * 2.0**-24 * magnitude_MN + 2.0**-11 * exact_MN.abs()).all()


@pytest.mark.parametrize("name", [None, "reference", "cublas"])
def test_a_matmul_of_ours(name: str | None):
    def multiply(a_MK, b_NK):
        if name is None:
            return matmul.matmul_fp16(a_MK, b_NK)
        with fe.backend(name):
            return matmul.matmul_fp16(a_MK, b_NK)

    check(multiply)


def test_a_linear_under_autocast():
    def multiply(a_MK, b_NK):
        with fe.amp.autocast("cpu", torch.float16):
            return torch.nn.functional.linear(a_MK.float(), b_NK.float())

    check(multiply)
