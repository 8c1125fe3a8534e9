"""Shapes as they are asked for, operands as they are multiplied, and the check that no wrong result passes."""

import math

import pytest
import torch

from fp8engine.bench.cases import CHUNK, KINDS, LLM, Operands, Shape, Truth, parse, values
from fp8engine.bench.gemm import ROUNDING
from fp8engine.errors import Fp8EngineError, ShapeError, UnknownName

CPU = torch.device("cpu")


def test_names_and_triples_join_and_the_llm_shapes_are_of_the_promised_sizes():
    assert parse("llm") == list(LLM)
    assert parse(" 1, 2,3 ; 4,5,6;1,2,3") == [Shape(1, 2, 3), Shape(4, 5, 6)]  # no shape twice
    assert Shape(8192, 8192, 8192) in parse("square")
    assert {shape.m for shape in LLM} == {4096, 8192, 16384}
    assert {size for shape in LLM for size in shape[1:]} == {1024, 4096, 7168, 8192, 14336, 28672}


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        ("lmm", UnknownName, "did you mean 'llm'"),
        ("64", UnknownName, "M,N,K"),
        ("64,64", ShapeError, "'64,64'"),
        ("64,64,64,64", ShapeError, "three whole numbers"),
        ("64,0,64", ShapeError, "from 1 on"),
        ("64,-1,64", ShapeError, "'64,-1,64'"),
        ("64,x,64", ShapeError, "'64,x,64'"),
        ("64,²,64", ShapeError, "three whole numbers"),
        ("", ShapeError, "no shapes"),
        (" ; ", ShapeError, "no shapes"),
    ],
)
def test_what_is_no_shape_is_refused(text: str, error: type[Fp8EngineError], told: str):
    with pytest.raises(error, match=told):
        parse(text)


@pytest.mark.parametrize("kind", KINDS)
def test_operands_are_random_contiguous_along_k_and_kept(kind: str):
    operands = Operands(Shape(48, 32, 160), CPU)
    a, b = operands[kind]
    assert (a.data.shape, b.data.shape) == ((48, 160), (32, 160))
    assert a.data.stride(1) == b.data.stride(1) == 1
    assert operands[kind].a.data is a.data  # nothing is made inside a timed call
    again, other = (Operands(Shape(48, 32, 160), CPU, seed=seed)[kind].a.data.view(torch.uint8) for seed in (0, 1))
    assert torch.equal(again, a.data.view(torch.uint8))
    assert not torch.equal(other, again)
    assert (values(a) != 0).float().mean() > 0.95


def test_values_apply_each_block_its_scale():
    a, b = Operands(Shape(4, 300, 200), CPU)["block"]
    for operand, rows, first in ((a, 1, 2), (b, 128, 0)):
        want = operand.data.double()
        for row in range(want.shape[0]):
            for column in range(want.shape[1]):
                want[row, column] *= operand.scale[row // rows, column // 128]
        torch.testing.assert_close(values(operand), want, rtol=0, atol=0)
        torch.testing.assert_close(values(operand, first), want[first:], rtol=0, atol=0)
    torch.testing.assert_close(values(b, 128, 290), values(b)[128:290], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["bf16", "tensor", "row", "block"])
def test_the_truth_is_the_product_of_the_quantised_operands(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fp8engine.bench.cases.CHUNK", 1 << 15)  # several pieces
    assert CHUNK > 1 << 15
    pair = Operands(Shape(300, 400, 130), CPU)[kind]
    y, truth = values(pair.a) @ values(pair.b).t(), Truth.of(pair)
    assert truth.error(y) < 1e-14
    assert ROUNDING / 3 < truth.error(y.bfloat16()) < ROUNDING * 1.5


def product(m: int, n: int, k: int = 64) -> tuple[Truth, torch.Tensor]:
    pair = Operands(Shape(m, n, k), CPU)["bf16"]
    return Truth.of(pair), values(pair.a) @ values(pair.b).t()


def test_one_tile_of_zeros_between_the_checked_rows_shows():
    truth, y = product(2048, 1024)
    assert not set(range(1, 32)) & set(truth.rows_R.tolist())
    y[1:32, 512:640] = 0
    assert truth.error(y) > 0.1


def test_what_is_not_finite_or_of_another_shape_is_wrong_without_limit():
    truth, y = product(256, 32)
    assert truth.error(y[:, :-1]) == truth.error(y.t()) == math.inf
    for value in (math.nan, math.inf):
        y[1, 5] = value
        assert truth.error(y) == math.inf


@pytest.mark.parametrize("m", [1, 31, 33, 200])
def test_a_short_last_stripe_counts_by_its_own_rows(m: int):
    truth, y = product(m, 48)
    assert truth.error(y) < 1e-14
    assert truth.error(y * 1.01) == pytest.approx(0.01, rel=0.8)
    y[-1] = 0
    assert truth.error(y) > 0.1


def test_a_wrong_row_in_a_short_last_stripe_is_not_thinned_out():
    truth, y = product(2050, 48)  # the last stripe is rows 2048 and 2049, of which the first is not among the checked
    assert 2048 not in truth.rows_R
    y[2048] = 0
    size = truth.exact_RN.square().mean().sqrt() * math.sqrt(48)
    assert truth.error(y) == pytest.approx(float(truth.probe_M[2048].abs() / math.sqrt(2) / size))
