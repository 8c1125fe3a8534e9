"""Split-K in the interpreter: every matmul in parts against float64, at the edges of M, N, K and of a part."""

import pytest
import torch
from casts import E4M3
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8engine.kernels import split_k
from fp8engine.kernels.matmul import matmul_fp8, matmul_fp16
from fp8engine.kernels.tuning import Config
from fp8engine.ops.reference import Epilogue, Operand, add_parts, quantize
from tests.helpers.casts import cast_of

POINTERS = Config(128, 128, 128, descriptors=False, split_k=16)
DESCRIPTORS = Config(128, 128, 128, flatten=True, split_k=16)


def operand(rows: int, k: int, how: tuple[int, int]) -> Operand:
    return Operand(*quantize(torch.randn(rows, k), cast_of(E4M3, *how)), *how)


def real(x: Operand) -> torch.Tensor:
    scale = x.scale.double()
    if x.scaled_along_k:
        m, k = x.data.shape
        scale = scale.repeat_interleave(x.rows, 0)[:m].repeat_interleave(x.cols, 1)[:, :k]
    return x.data.double() * scale


def parts_made(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The parts of each split matmul, in a list that fills."""
    made: list[torch.Tensor] = []
    add = split_k.add_parts
    monkeypatch.setattr(split_k, "add_parts", lambda part, *rest: made.append(part) or add(part, *rest))
    return made


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("tensor", DESCRIPTORS),
        ("promoted", POINTERS),
        ("row", POINTERS),
        ("1x128", DESCRIPTORS),
        ("fp16", POINTERS),
    ],
)
def test_every_matmul_in_parts(kind: str, config: Config, monkeypatch: pytest.MonkeyPatch, assert_within_bound):
    made = parts_made(monkeypatch)
    for m, n, k in ((3, 40, 2048), (130, 16, 2064)):  # 4 parts of a tile; 2 of two, with rows beyond M
        bias_N, end = torch.randn(n), Epilogue(None, torch.float32)
        if kind == "fp16":
            a_MK, b_NK = torch.randn(m, k).half(), torch.randn(n, k).half()
            y_MN = matmul_fp16(a_MK, b_NK, end._replace(bias_N=bias_N), config)
            assert_within_bound(y_MN, a_MK.double(), b_NK.double(), bias_N)
            continue
        how = {"row": (1, -1), "1x128": (1, 128)}.get(kind, (-1, -1))
        a, b = operand(m, k, how), operand(n, k, (128, 128) if kind == "1x128" else how)
        y_MN = matmul_fp8(a, b, end._replace(bias_N=bias_N), kind == "promoted", config)
        assert_within_bound(y_MN, real(a), real(b), bias_N)
    assert {len(part) for part in made} == {4, 2}


@settings(max_examples=6)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(2048, 2400), st.sampled_from([POINTERS, DESCRIPTORS]))
def test_any_shape_that_is_split(assert_within_bound, m, n, k, config):
    a, b = operand(m, k, (-1, -1)), operand(n, k, (1, -1))
    config = config._replace(descriptors=config.descriptors and k % 16 == 0)
    y_MN = matmul_fp8(a, b, Epilogue(None, torch.bfloat16), False, config)
    assert_within_bound(y_MN, real(a), real(b), None)


def test_the_kernel_adds_as_its_twin_does():
    part_SMN = torch.randn(7, 19, 133) * torch.exp2(torch.randint(-20, 21, (7, 19, 133)).float())
    for scales in ((None, None), (torch.rand(19, 1), torch.rand(133, 1)), (torch.tensor(0.3), torch.tensor(3.1))):
        found = split_k.add_parts(part_SMN, scales, Epilogue(out=torch.float32))
        assert torch.equal(found, add_parts(part_SMN, scales, Epilogue(out=torch.float32)))


@pytest.mark.parametrize("asked", ["amax", "counts"])
def test_a_sum_of_parts_may_be_told_by_its_amax_or_by_its_counts_alone(asked: str):
    part_SMN = 100 * torch.randn(3, 5, 70)
    part_SMN[0, 1, 2] = float("nan")
    wanted, found = (
        Epilogue(None, E4M3, "none", torch.tensor(1.0), **{asked: torch.zeros(2 if asked == "counts" else 1)})
        for _ in "ab"
    )
    if asked == "counts":
        wanted, found = (end._replace(counts=end.counts.long()) for end in (wanted, found))
    y = split_k.add_parts(part_SMN, (None, None), found)
    assert torch.equal(y.float().nan_to_num(), add_parts(part_SMN, (None, None), wanted).float().nan_to_num())
    assert getattr(found, asked).tolist() == getattr(wanted, asked).tolist() != [0] * len(getattr(found, asked))
