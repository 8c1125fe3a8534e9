"""tests/nn/test_amp_accumulation.py, asked of the Triton kernel."""

import torch
from nn.test_amp_accumulation import check

import fp8engine as fe
from fp8engine.ops import matmul


def test_the_kernel_sums_fp16_products_in_fp32():
    def multiply(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
        with fe.backend("triton"):
            return matmul.matmul_fp16(a_MK, b_NK)

    check(multiply)
