"""Split-K on the emulated card: parts that are exact, and their sum in the order that its twin says, bit for bit."""

from typing import Any

import pytest
import torch

from benchmarks.checks.operands import counts, differs, exact, in_blocks, integers
from fp8engine.kernels import split_k
from fp8engine.kernels.matmul import matmul_fp8, matmul_fp16
from fp8engine.kernels.tuning import table
from fp8engine.numerics.formats import E4M3, E5M2
from fp8engine.ops import reference
from fp8engine.ops.reference import Epilogue

CPU = torch.device("cpu")
M, N, K = 13, 48, 2192  # a tile; 4 parts of 640 and one of 272: the pretended card has 4 multiprocessors
SPLIT = [
    (operation, int(arch.removeprefix("sm_")), name)
    for operation, cards in table().items()
    for arch, rows in cards.items()
    for name, config in rows.items()
    if config.split_k > 1
]
THIN = [each for each in SPLIT if each[1:] == (90, "small")]


def end(n: int) -> Any:
    """Everything an epilogue has, with statistics that start where nothing else would leave them."""
    bias_N = torch.arange(n).remainder(7).bfloat16()
    return Epilogue(bias_N, E4M3.dtype, "relu", torch.tensor(0.3), torch.full((1,), -1.0), counts(CPU))


def run(operation: str, config, epilogue: Epilogue, k: int) -> tuple[torch.Tensor, Any, Any, tuple]:
    """(y, a, b, the scales that the parts have not got yet) of operands whose sums are exact."""
    if operation == "matmul_fp16":
        a, b = (torch.randint(-2, 3, (rows, k)).bfloat16() for rows in (M, N))
        one = torch.ones(())
        y_MN = matmul_fp16(a, b, epilogue, config)
        return y_MN, reference.Operand(a, one), reference.Operand(b, one), (None, None)
    if operation == "matmul_block":
        a, b = in_blocks(CPU, M, k, 1), in_blocks(CPU, N, k, 128)
        return matmul_fp8(a, b, epilogue, config=config), a, b, (None, None)
    a, b = integers(CPU, M, k, E5M2, by_row=True), integers(CPU, N, k, E4M3, by_row=False)
    y_MN = matmul_fp8(a, b, epilogue, operation.endswith("promoted"), config)
    return y_MN, a._replace(scale=torch.ones(())), b._replace(scale=torch.ones(())), (a.scale, b.scale)


def test_parts_are_exact_and_added_as_the_twin_adds_them(card, monkeypatch: pytest.MonkeyPatch, whole: bool):
    kept: list[torch.Tensor] = []
    add = split_k.add_parts
    monkeypatch.setattr(split_k, "add_parts", lambda part, *rest: kept.append(part) or add(part, *rest))
    for operation, architecture, name in SPLIT if whole else THIN:
        there = card(architecture)
        config = table()[operation][f"sm_{architecture}"][name]
        k = K - (3 if name == "unaligned" else 0)
        ours, twins = end(N), end(N)
        y_MN, a, b, scales = run(operation, config, ours, k)
        part_SMN, depth = kept[-1], split_k.depth_of(k, config, 4)
        assert [done.ctas for done in there.done] == [4, 1]  # unsplit it is one program
        for part_MN, first in zip(part_SMN, range(0, k, depth), strict=True):
            a_part, b_part = (_columns(x, first, first + depth) for x in (a, b))
            assert differs(part_MN, exact(a_part, b_part, None)) is None
        assert differs(y_MN.float(), reference.add_parts(part_SMN, scales, twins).float()) is None
        assert [ours.amax.item(), ours.counts.tolist()] == [twins.amax.item(), twins.counts.tolist()]


def _columns(x: reference.Operand, first: int, last: int) -> reference.Operand:
    """The operand's k from `first` to `last`, where a group of 128 begins."""
    scale = x.scale[:, first // 128 : -(-last // 128)] if x.scaled_along_k else x.scale
    return x._replace(data=x.data[:, first:last], scale=scale)


def test_parts_are_added_in_the_twins_order_with_what_is_not_finite(card):
    card(90)
    shapes, outputs = [(1, 1), (17, 131), (16, 128)], [torch.bfloat16, torch.float32, E4M3.dtype]
    for (m, n), out, by_row in zip(shapes, outputs, [False, True, True], strict=True):
        part_SMN = torch.randn(5, m, n) * torch.exp2(torch.randint(-20, 21, (5, m, n)).float())
        part_SMN[2, 0, 0] = float("inf")
        part_SMN[3, -1, -1] = float("nan")
        # Powers of two: the compiler may make one rounding of a scale and a bias (fma), and the twin makes two.
        scales = [torch.exp2(torch.randint(-3, 4, (rows, 1) if by_row else ()).float()) for rows in (m, n)]
        scale = torch.tensor(0.3) if out == E4M3.dtype else None
        ours, twins = (end(n)._replace(out=out, scale=scale) for _ in "ab")
        found, wanted = (add.add_parts(part_SMN, scales, to) for add, to in ((split_k, ours), (reference, twins)))
        assert found.dtype == wanted.dtype == out
        assert torch.equal(found.float().nan_to_num(7e7), wanted.float().nan_to_num(7e7))
        assert [ours.amax.item(), ours.counts.tolist()] == [twins.amax.item(), twins.counts.tolist()]


def test_the_last_rows_of_a_part_are_not_written_over_by_the_next(card):
    """65 rows: a second row of tiles that reaches 63 rows beyond M, where the next part's rows lie."""
    there = card(90)
    config = table()["matmul_fp8"]["sm_90"]["small"]
    a, b = integers(CPU, 65, 2048, E4M3, by_row=False), integers(CPU, 16, 2048, E4M3, by_row=False)
    found = matmul_fp8(a, b, Epilogue(None, torch.float32), False, config)
    assert [done.ctas for done in there.done] == [4, 5]
    assert differs(found, exact(a, b, None)) is None
