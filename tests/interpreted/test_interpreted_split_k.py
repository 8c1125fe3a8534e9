"""Split-K in the interpreter: every matmul in parts against float64, at the edges of M, N, K and of a part."""

import pytest
import torch
from casts import E4M3
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted.test_interpreted_matmul import FP32, PAIRS, ROW, TENSOR, multiply, random
from real_operands import real

from fp8engine.kernels import split_k
from fp8engine.kernels.tuning import Config
from fp8engine.ops.reference import Epilogue, add_parts

POINTERS = Config(128, 128, 128, descriptors=False, split_k=16)
DESCRIPTORS = Config(128, 128, 128, flatten=True, split_k=16)


@pytest.mark.parametrize(
    ("kind", "pair", "config"),
    [
        ("fp8", (TENSOR, TENSOR), DESCRIPTORS),
        ("fp8", (ROW, ROW), POINTERS),
        ("promoted", (TENSOR, TENSOR), POINTERS),
        ("block", PAIRS["block"][1], DESCRIPTORS),
        ("fp16", PAIRS["fp16"][0], POINTERS),
    ],
    ids=str,
)
def test_every_matmul_in_parts(kind, pair, config, monkeypatch: pytest.MonkeyPatch, assert_within_bound):
    made: list[torch.Tensor] = []
    add = split_k.add_parts
    monkeypatch.setattr(split_k, "add_parts", lambda part, *rest: made.append(part) or add(part, *rest))
    for m, n, k in ((3, 40, 2048), (130, 16, 2064)):  # 4 parts of a tile; 2 of two, with rows beyond M
        a, b, bias_N = random(pair[0], m, k), random(pair[1], n, k), torch.randn(n)
        y_MN = multiply(kind, a, b, FP32._replace(bias_N=bias_N), config)
        assert_within_bound(y_MN, real(a), real(b), bias_N)
    assert {len(part) for part in made} == {4, 2}


@settings(max_examples=6)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(2048, 2400), st.sampled_from([POINTERS, DESCRIPTORS]))
def test_any_shape_that_is_split(assert_within_bound, m, n, k, config):
    a, b = random(TENSOR, m, k), random(ROW, n, k)
    config = config._replace(descriptors=config.descriptors and k % 16 == 0)
    assert_within_bound(multiply("fp8", a, b, Epilogue(None, torch.bfloat16), config), real(a), real(b), None)


def test_the_kernel_adds_as_its_twin_does():
    part_SMN = torch.randn(7, 19, 133) * torch.exp2(torch.randint(-20, 21, (7, 19, 133)).float())
    for scales in ((None, None), (torch.rand(19, 1), torch.rand(133, 1)), (torch.tensor(0.3), torch.tensor(3.1))):
        assert torch.equal(split_k.add_parts(part_SMN, scales, FP32), add_parts(part_SMN, scales, FP32))


@pytest.mark.parametrize(("name", "zeros"), [("amax", torch.zeros(1)), ("counts", torch.zeros(2).long())], ids=str)
def test_a_sum_of_parts_may_be_told_by_its_amax_or_by_its_counts_alone(name: str, zeros: torch.Tensor):
    part_SMN = 100 * torch.randn(3, 5, 70)
    part_SMN[0, 1, 2] = float("nan")
    wanted, found = (Epilogue(None, E4M3, "none", torch.tensor(1.0), **{name: zeros.clone()}) for _ in "ab")
    y = split_k.add_parts(part_SMN, (None, None), found)
    assert torch.equal(y.float().nan_to_num(), add_parts(part_SMN, (None, None), wanted).float().nan_to_num())
    assert torch.equal(getattr(found, name), getattr(wanted, name))
    assert getattr(found, name).any()
