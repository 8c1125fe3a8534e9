"""Bugs planted in the kernels of experts: the emulated card names each, or the result is wrong; launches of a step."""

from __future__ import annotations

import contextlib
from types import ModuleType
from unittest import mock

import pytest
import torch
from edited_kernels import edited_kernel
from emulator.card import emulated
from emulator.faults import Fault
from emulator.launch import Done, Launch

import fp8engine as fe
from benchmarks.checks.operands import differs
from fp8engine.kernels import matmul_grouped, quantize_experts
from fp8engine.kernels.tuning import Config
from fp8engine.nn.grouped import GroupedLinear
from fp8engine.ops import triton_backend
from fp8engine.ops.reference import Operand
from fp8engine.ops.reference import grouped as twin
from tests.helpers.casts import cast_of

E4M3 = torch.float8_e4m3fn
SIZES = [17, 0, 140]
SMALL = Config(64, 32, 64, group_m=2, warps=4, stages=2, descriptors=False)
BUGS = [
    ("matmul_grouped", "row_b = expert * N + column", "row_b = column"),
    ("matmul_grouped", "bias_N = bias + tl.cast(expert, tl.int64) * N", "bias_N = bias"),
    ("matmul_grouped", "last = tl.load(bounds + EXPERTS + 2", "last = 1 + tl.load(bounds + EXPERTS + 2"),
    ("matmul_grouped", "first = tl.load(bounds + EXPERTS + 1 + expert) * 128", "first = tl.load(bounds + expert)"),
    ("matmul_grouped", "tl.load(bounds + EXPERTS) + tl.program_id(0) * CLEAR, M,", "M, M,"),
    ("matmul_grouped", "y_MN = y + tl.cast(expert, tl.int64) * M * N", "y_MN = y"),
    ("quantize_experts", "& (block == first)", "& (block == 0)"),
    ("quantize_experts", "mask=(columns < K) & empty", "mask=(columns < K) & (empty == 0)"),
    ("quantize_experts", "codes_MK.T, column, block * 128", "codes_MK.T, column, row"),
]  # fmt: skip


def right(matmuls: ModuleType, casts: ModuleType) -> bool:
    """Whether a cast by column, both matmuls and a row behind the last expert's are the twins', to the bit."""
    bounds, rows, n, k = twin.bounds_of(torch.tensor(SIZES)), sum(SIZES) + 1, 40, 48
    integers = lambda *shape: torch.randint(-2, 3, shape).float().to(E4M3)  # noqa: E731 - four uses
    a, b = Operand(integers(rows, k), torch.tensor(0.5)), Operand(integers(len(SIZES) * n, k), torch.tensor(1.0))
    bias = torch.randint(-3, 4, (len(SIZES), n)).float()
    y = matmuls.grouped_rows(a, b, bounds, matmuls.Result(torch.float32, bias), False, SMALL)
    if differs(y, twin.grouped_rows(a, b, bounds, bias, torch.float32)):
        return False
    how = cast_of(E4M3, -1, 1, True)
    found = casts.quantize_experts(y, how, bounds, None, True)
    wanted = twin.quantize_experts(y, how, bounds, None, True)
    used = 128 * int(bounds[1, -1])
    if differs(found[0][:, :used].float(), wanted[0][:, :used].float()) or differs(found[1], wanted[1]):
        return False
    a, b = (Operand(twin.transpose_experts(integers(rows - 1, size), bounds), torch.tensor(1.0)) for size in (n, k))
    for x in (a, b):  # the blocks that nobody writes
        x.data[:, used:] = float("nan")
    dw = matmuls.grouped_sums(a, b, bounds, matmuls.Result(torch.float32), True, SMALL)
    return differs(dw, twin.grouped_sums(a, b, bounds)) is None


@pytest.mark.slow
@pytest.mark.short
def test_without_a_bug_all_is_right(schedule: int):
    with emulated(seed=schedule):
        assert right(matmul_grouped, quantize_experts)


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "old", "new"), BUGS, ids=lambda value: value[:40])
def test_a_planted_bug_is_found(name: str, old: str, new: str, tmp_path, schedule: int, monkeypatch):
    module = edited_kernel(tmp_path, name, old, new)
    modules = (module, quantize_experts) if name == "matmul_grouped" else (matmul_grouped, module)
    with contextlib.suppress(Fault), emulated(seed=schedule) as there:
        monkeypatch.setattr(torch, "empty", _unwritten(there))
        assert not right(*modules)


def _unwritten(there):
    plain = torch.empty

    def empty(*size, dtype=None, device=None, **options):
        y = plain(*size, dtype=dtype, device=device, **options)
        return there.empty(y.nbytes).view(y.dtype).view(y.shape)

    return empty


LAUNCHES = {"current": 12, "delayed": 12, "rowwise": 12, "blockwise": 9}  # 54, 54, 116 and 83 before, for 16 experts


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize("experts", [2, 16])
@pytest.mark.parametrize("recipe", LAUNCHES)
def test_a_step_has_as_many_launches_for_any_number_of_experts(recipe: str, experts: int, monkeypatch):
    monkeypatch.setattr(triton_backend, "no_card", lambda where, oldest=None: None)
    monkeypatch.setattr(Launch, "run", lambda self, seed: Done("", 0, 0, 0))
    layer = GroupedLinear(experts, 128, 128, recipe=recipe)
    x = torch.randn(17 * experts, 128, requires_grad=True)
    with fe.backend("triton"), emulated() as there, mock.patch.object(twin, "parts_of", _waited):
        y = layer(x, torch.full((experts,), 17))
        y.backward(torch.ones_like(y))
    assert len(there.done) == LAUNCHES[recipe]


def _waited(bounds):
    raise AssertionError("the host read where the rows of experts lie")
