"""The kernels of experts in the interpreter: any division of any number of rows, against float64 and the twins."""

import hypothesis.strategies as st
import pytest
import torch
from casts import E4M3, E5M2, cast_of
from contracts import in_bytes, slot_of
from hypothesis import given, settings
from real_operands import real

from fp8engine.kernels import expert_rows
from fp8engine.kernels.matmul_grouped import grouped_rows, grouped_sums
from fp8engine.kernels.quantize_experts import expert_sums, quantize_experts, transpose_experts
from fp8engine.kernels.tuning import Config
from fp8engine.ops.reference import Epilogue, Operand, Slot, quantize
from fp8engine.ops.reference import grouped as twin

SMALL = Config(64, 32, 64, group_m=2, warps=4, stages=2, descriptors=False)
DESCRIBED = SMALL._replace(descriptors=True)
DIVISION = st.lists(st.sampled_from([0, 0, 1, 17, 127, 128, 129, 260]), min_size=1, max_size=5)
KINDS = st.sampled_from([(-1, -1), (1, -1), (1, 128), (32, 32)])


def cast(x: torch.Tensor, rows: int, cols: int, bounds: torch.Tensor, transposed: bool = False) -> Operand:
    """x by the twins, groups within an expert."""
    how = cast_of(E4M3, rows, cols, power_of_2=True)
    if rows == 1 or (rows, cols) == (-1, -1):
        return Operand(*quantize(x, how), rows, cols, True)
    q, scale = twin.quantize_experts(x, how, bounds, None, transposed)
    return Operand(q, scale, *((cols, rows) if transposed else (rows, cols)), True)


@settings(max_examples=8)
@given(DIVISION, st.integers(1, 70), st.integers(1, 200), KINDS, st.booleans(), st.integers(0, 3))
def test_rows_of_any_division(assert_within_bound, sizes, n, k, kind, descriptors, beyond):
    bounds, t, experts = twin.bounds_of(torch.tensor(sizes)), sum(sizes) + beyond, len(sizes)
    a = cast(torch.randn(t, k), *kind, twin.bounds_of(torch.tensor([*sizes, beyond])))
    if kind == (32, 32) and beyond:
        return  # groups of rows that belong to no expert are not cast
    square = (128, 128) if kind == (1, 128) else kind
    b = cast(torch.randn(experts * n, k), *square, twin.bounds_of_equal(n, experts, torch.device("cpu")))
    if square[0] > 1:
        b = b._replace(scale=b.scale[: experts * -(-n // 128) * (128 // square[0])])
    described = descriptors and k % 16 == 0 and t > 0
    config = (DESCRIBED if described else SMALL)._replace(block_k=kind[1] if kind[1] > 1 else 64)
    bias_EN = torch.randn(experts, n)
    y = grouped_rows(a, b, bounds, Epilogue(bias_EN, torch.float32), True, config)
    assert (y.shape, y.dtype) == ((t, n), torch.float32)
    for e, part in enumerate(twin.parts_of(bounds)):
        a_e, b_e = twin.part_of_rows(a, part, e), twin.part_of_stack(b, experts, e)
        assert_within_bound(y[part.start : part.end], real(a_e), real(b_e), bias_EN[e], (e, sizes))
    assert not y[sum(sizes) :].any()


@settings(max_examples=8)
@given(DIVISION, st.integers(1, 70), st.integers(1, 40), st.sampled_from([(-1, -1), (-1, 1), (128, 1), (32, 32)]))
def test_sums_of_any_division(assert_within_bound, sizes, m, n, kind):
    bounds, t, experts = twin.bounds_of(torch.tensor(sizes)), sum(sizes), len(sizes)
    if kind == (-1, -1):
        rows = (cast(torch.randn(t, columns), *kind, bounds) for columns in (m, n))
        a, b = (x._replace(data=twin.transpose_experts(x.data, bounds)) for x in rows)
    else:
        a, b = (cast(torch.randn(t, columns), *kind, bounds, True) for columns in (m, n))
    config = DESCRIBED._replace(block_k=kind[0] if kind[0] > 1 else 64, descriptors=t > 0)
    dw = grouped_sums(a, b, bounds, Epilogue(None, torch.float32), True, config)
    for e, part in enumerate(twin.parts_of(bounds)):
        a_e, b_e = (twin.part_of_columns(x, part, e) for x in (a, b))
        assert_within_bound(dw[e], real(a_e), real(b_e), None, (e, sizes))
        assert part.end > part.start or not dw[e].any()
    assert (dw.shape, dw.dtype) == ((experts, m, n), torch.float32)


@settings(max_examples=8)
@given(DIVISION, st.integers(1, 140), st.sampled_from([(-1, 1), (128, 1), (16, 16), (64, 128)]), st.booleans())
def test_casts_of_any_division_are_the_twins(sizes, k, group, transposed):
    bounds, t = twin.bounds_of(torch.tensor(sizes)), sum(sizes)
    x = torch.randn(t, k) * torch.exp2(torch.randint(-9, 9, (t, k)))
    how = cast_of(E5M2 if transposed else E4M3, *group, power_of_2=k % 2 == 0)
    q, scale = quantize_experts(x, how, bounds, None, transposed)
    q_twin, scale_twin = twin.quantize_experts(x, how, bounds, None, transposed)
    used = 128 * int(bounds[1, -1])
    columns, groups = (slice(used), slice(None)) if transposed else (slice(None), slice(None))
    assert torch.equal(q.float()[:, columns], q_twin.float()[:, columns])
    if group[0] != -1:
        groups = slice(used // group[0])
        scale, scale_twin = ((s[:, groups] if transposed else s[groups]) for s in (scale, scale_twin))
    assert torch.equal(scale, scale_twin)


@pytest.mark.parametrize("group", [(-1, 1), (32, 32)])
def test_rows_of_which_no_expert_has_one_are_no_call(group):
    slot = Slot(torch.tensor([[-1.0], [0.0]]), torch.zeros(7, 1, dtype=torch.int64), 0)
    quantize_experts(torch.randn(130, 40), cast_of(E4M3, *group), twin.bounds_of(torch.tensor([0, 0])), slot)
    assert (slot.live_2S.flatten().tolist(), slot.counts_CS.any()) == ([-1.0, 0.0], torch.tensor(False))


@settings(max_examples=5)
@given(DIVISION, st.integers(1, 70))
def test_transposes_and_sums_of_any_division(sizes, n):
    bounds, t = twin.bounds_of(torch.tensor(sizes)), sum(sizes)
    codes, x = torch.randint(0, 256, (t, n), dtype=torch.uint8).view(E4M3), torch.randint(-9, 10, (t, n)).bfloat16()
    used = 128 * int(bounds[1, -1])
    both = transpose_experts, twin.transpose_experts
    found, wanted = (each(codes, bounds).view(torch.uint8)[:, :used] for each in both)
    assert torch.equal(found, wanted)
    assert torch.equal(expert_sums(x, bounds), twin.expert_sums(x, bounds))


@given(DIVISION)
def test_the_host_s_bound_holds_every_division(sizes):
    blocks = int(twin.bounds_of(torch.tensor(sizes))[1, -1])
    assert blocks <= expert_rows.most_blocks(sum(sizes), len(sizes)) == twin.most_blocks(sum(sizes), len(sizes))


@pytest.mark.parametrize("processors", [1, 5])
def test_any_number_of_programs_covers_every_tile(processors, monkeypatch):
    from fp8engine.kernels import launch
    from fp8engine.kernels import quantize_experts as casts

    for module in (launch, casts):
        monkeypatch.setattr(module, "processors", lambda where: processors)
    sizes = [3, 0, 200, 129]
    bounds = twin.bounds_of(torch.tensor(sizes))
    a = Operand(torch.randint(-2, 3, (sum(sizes), 32)).float().to(E4M3), torch.tensor(1.0))
    b = Operand(torch.randint(-2, 3, (4 * 70, 32)).float().to(E4M3), torch.tensor(1.0))
    y = grouped_rows(a, b, bounds, Epilogue(None, torch.float32), False, SMALL)
    assert torch.equal(y, twin.grouped_rows(a, b, bounds, out=torch.float32))
    slots = slot_of(), slot_of()
    y[0, 0] = 1e5  # in the first tile of several
    q, scale = casts.quantize_experts(y, cast_of(E4M3, -1, 1), bounds, slots[0], True)
    wanted = twin.quantize_experts(y, cast_of(E4M3, -1, 1), bounds, slots[1], True)
    used = 128 * int(bounds[1, -1])
    assert torch.equal(q.float()[:, :used], wanted[0].float()[:, :used])
    assert torch.equal(scale, wanted[1])
    assert in_bytes(slots[0]) == in_bytes(slots[1])
