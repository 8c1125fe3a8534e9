"""The kernels of experts from their PTX: one launch over all of them, with every number of rows that a router can give.

Operands are small integers under power-of-two scales, whose products and sums are exact in any order: bit for bit.
What lies behind an expert's rows, behind the last expert's and behind a matrix is NaN: nobody may let it in.
"""

from unittest import mock

import pytest
import torch
from casts import E4M3, E5M2, cast_of
from contracts import in_bytes, slot_of
from emulator.card import emulated
from emulator.launch import Done, Launch
from experts import run, uneven
from support import sqnr

import fp8engine as fe
from benchmarks.checks.operands import differs
from fp8engine.kernels import quantize_experts
from fp8engine.kernels.matmul_grouped import grouped_rows, grouped_sums
from fp8engine.kernels.tuning import Config, table
from fp8engine.nn.grouped import GroupedLinear
from fp8engine.ops import triton_backend
from fp8engine.ops.reference import Epilogue, Operand
from fp8engine.ops.reference import grouped as twin

K = 272  # two blocks of 128 and one of 16
MANY = [17] * 64
DIVISIONS = {
    "uneven": [17, 0, 130, 64, 5],
    "all in one": [0, 300, 0],
    "whole blocks": [128, 256, 128],
    "one": [200],
    "first and last are empty": [0, 1, 0],
}
KINDS = {"tensor": (-1, -1), "row": (1, -1), "block": (1, 128)}
# Kind, promoted, architecture, configuration: each committed one once.
COMMITTED = sorted(
    {
        (
            kind,
            operation != "matmul_fp8",
            int(arch.removeprefix("sm_")),
            config._replace(ratio=None, kernel="triton", flatten=False, split_k=1),
        )
        for operation, kind in (("matmul_fp8", "row"), ("matmul_fp8_promoted", "row"), ("matmul_block", "block"))
        for arch, configs in table()[operation].items()
        for config in configs.values()
    },
    key=str,
)
# Of these `make test` runs two: one by descriptors, one by pointers.
THIN = [
    table()[operation][arch]["small"]._replace(ratio=None, flatten=False, split_k=1)
    for operation, arch in (("matmul_block", "sm_90"), ("matmul_fp8_promoted", "sm_89"))
]
QUICK = Config(64, 32, 64, group_m=2, warps=4, stages=3)
HOPPER = Config(128, 128, 128, group_m=2, warps=8, stages=3, parts=2, kernel="gluon")


def codes(rows: int, columns: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randint(-1, 2, (rows, columns)).float().to(dtype)


def scales(*shape: int) -> torch.Tensor:
    return torch.exp2(torch.randint(-3, 4, shape).float())


def operand(kind: str, rows: int, columns: int, square: bool = False, dtype: torch.dtype = E4M3) -> Operand:
    """Rows of experts, or a stack of their matrices where `square`."""
    across = -(-columns // 128)
    if kind == "tensor":
        return Operand(codes(rows, columns, dtype), torch.tensor(0.5))
    if kind == "row":
        return Operand(codes(rows, columns, dtype), scales(rows, 1), 1, -1)
    if square:
        return Operand(codes(rows, columns, dtype), scales(-(-rows // 128), across), 128, 128, True)
    return Operand(codes(rows, columns, dtype), scales(rows, across), 1, 128, True)


def stack(kind: str, experts: int, rows: int, columns: int) -> Operand:
    """Experts' matrices; squares begin anew at each."""
    parts = [operand(kind, rows, columns, square=True) for _ in range(experts)]
    scale = parts[0].scale if kind == "tensor" else torch.cat([part.scale for part in parts])
    return parts[0]._replace(data=torch.cat([part.data for part in parts]), scale=scale)


def transposed(kind: str, sizes: list[int], bounds: torch.Tensor, columns: int, dtype=E4M3) -> Operand:
    """Columns of experts, in blocks."""
    data = twin.transpose_experts(codes(sum(sizes), columns, dtype), bounds)
    blocks = data.shape[1] // 128
    if kind == "tensor":
        return Operand(data, torch.tensor(0.25))
    if kind == "row":
        return Operand(data, scales(len(sizes), columns), 1, -1)
    return Operand(data, scales(blocks, columns).t(), 1, 128, True)  # along rows, as the cast leaves them


def check_rows(kind: str, sizes: list[int], n: int, k: int, promoted: bool, config: Config | None, beyond: int = 3):
    """Rows of NaN behind the last expert's; a bias; every output's dtype by turns."""
    bounds, rows = twin.bounds_of(torch.tensor(sizes)), sum(sizes) + beyond
    a, b = operand(kind, rows, k), stack(kind, len(sizes), n, k)
    if beyond:
        a.data[-beyond:] = float("nan")
    bias = torch.randint(-3, 4, (len(sizes), n)).bfloat16()
    for out, bias_EN in ((torch.float32, None), (torch.bfloat16, bias)):
        found = grouped_rows(a, b, bounds, Epilogue(bias_EN, out), promoted, config)
        assert differs(found, twin.grouped_rows(a, b, bounds, bias_EN, torch.float32).to(out)) is None


def check_sums(kind: str, sizes: list[int], m: int, n: int, promoted: bool, config: Config | None):
    bounds = twin.bounds_of(torch.tensor(sizes))
    a, b = transposed(kind, sizes, bounds, m), transposed(kind, sizes, bounds, n)
    for x in (a, b):  # blocks that are not there
        x.data[:, 128 * int(bounds[1, -1]) :] = float("nan")
    found = grouped_sums(a, b, bounds, Epilogue(None, torch.float32), promoted, config)
    assert differs(found, twin.grouped_sums(a, b, bounds)) is None
    for e, size in enumerate(sizes):
        assert size or not found[e].any()


@pytest.mark.short
@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "promoted", "architecture", "config"),
    [pytest.param(*case, marks=() if case[-1] in THIN else pytest.mark.whole) for case in COMMITTED],
    ids=str,
)
def test_a_committed_configuration_is_exact(kind: str, promoted: bool, architecture: int, config: Config, card):
    card(architecture)
    odd = 0 if config.descriptors else 1
    check_rows(kind, DIVISIONS["uneven"], config.block_n + 16 + odd, K + odd, promoted, config)
    check_sums(kind, DIVISIONS["uneven"], config.block_m + 9, 40 + odd, promoted, config)


@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
def test_every_division_of_rows(division: str, card, whole: bool):
    card()
    first = list(DIVISIONS).index(division)
    for kind in KINDS if whole else [list(KINDS)[first % len(KINDS)]]:
        check_rows(kind, DIVISIONS[division], 40, 144, kind != "tensor", QUICK)
        check_sums(kind, DIVISIONS[division], 40, 24, kind != "tensor", QUICK)


@pytest.mark.short
@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
def test_hoppers_kernel_multiplies_every_division_of_rows(division: str, card, whole: bool):
    """The last rows of an expert are less than a tile, and its last columns and values of K too."""
    there, first = card(90), list(DIVISIONS).index(division)
    for kind in KINDS if whole else [list(KINDS)[-1 - first % len(KINDS)]]:
        check_rows(kind, DIVISIONS[division], 136, 144, True, HOPPER)
        check_sums(kind, DIVISIONS[division], 132, 136, True, HOPPER)
    assert {done.kernel for done in there.done} == {"_matmul_gluon_kernel"}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_hoppers_kernel_sums_four_products_together_and_the_rest_alone(kind: str, card):
    there = card(90)
    check_rows(kind, [140, 0, 3], 128, 656, True, HOPPER)
    check_sums(kind, [9, 0, 700], 64, 144, True, HOPPER)
    assert {done.kernel for done in there.done} == {"_matmul_gluon_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("config", [QUICK, HOPPER], ids=["Triton", "Gluon"])
def test_64_experts_of_17_rows(config: Config, card):
    card()
    check_rows("row", MANY, 16, 32, True, config)
    check_sums("row", MANY, 16, 16, True, config)


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, HOPPER], ids=["Triton", "Gluon"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_expert(bad: float, config: Config | None, card):
    sizes = [30, 3, 0, 70]
    bounds = twin.bounds_of(torch.tensor(sizes))
    card()
    a, b = operand("row", sum(sizes), 48), stack("row", len(sizes), 24, 48)
    a = a._replace(data=a.data.float().to(E5M2))
    a.data[31, 7], b.data[24 + 3, 5] = bad, float("nan")  # both of the second expert
    found = grouped_rows(a, b, bounds, Epilogue(None, torch.float32), config is not None, config)
    assert differs(found[:30], twin.grouped_rows(a, b, bounds, out=torch.float32)[:30]) is None
    assert found[33:].isfinite().all()
    assert not found[31].isfinite().any()
    x = torch.randn(sum(sizes), 24)
    x[31, 7] = bad
    how = cast_of(E4M3, -1, 1, True)
    q, scale = quantize_experts.quantize_experts(x, how, bounds, None, True)
    a = Operand(q, scale, 1, -1, True)
    dw = grouped_sums(a, a, bounds, Epilogue(None, torch.float32), config is not None, config)
    assert dw[[0, 2, 3]].isfinite().all()
    assert dw[1].isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("group", [(-1, 1), (128, 1), (32, 32), (128, 128)], ids=str)
def test_a_cast_is_its_twin_bit_for_bit(group: tuple[int, int], transpose: bool, card, whole: bool):
    card()
    cases = (
        (torch.bfloat16, DIVISIONS["uneven"]),
        (torch.float32, DIVISIONS["all in one"]),
        (torch.float16, DIVISIONS["whole blocks"]),
    )
    for i in range(3) if whole else [(group[1] + transpose) % 3]:
        dtype, sizes = cases[i]
        bounds, rows, columns = twin.bounds_of(torch.tensor(sizes)), sum(sizes) + 2 * (i == 0), 65 + 15 * i
        x = (torch.randn(rows, columns) * torch.exp2(torch.randint(-9, 6, (rows, columns)))).to(dtype)
        if i == 1:
            x[7, 3], x[100, 9] = float("inf"), float("nan")
        how = cast_of(E5M2 if i == 1 else E4M3, *group, power_of_2=i != 1)
        slots = slot_of(), slot_of()
        found = quantize_experts.quantize_experts(x, how, bounds, slots[0], transpose)
        wanted = twin.quantize_experts(x, how, bounds, slots[1], transpose)
        used = 128 * int(bounds[1, -1]) if transpose else sum(sizes)
        pair = (_used(one[0].float(), used, transpose).nan_to_num(1e9) for one in (found, wanted))
        assert differs(*pair) is None
        if group[0] != -1:
            used = 128 * int(bounds[1, -1]) // group[0]
            found, wanted = ((None, _used(one[1], used, transpose)) for one in (found, wanted))
        assert differs(found[1], wanted[1]) is None
        assert in_bytes(slots[0]) == in_bytes(slots[1])


def _used(x: torch.Tensor, size: int, transpose: bool) -> torch.Tensor:
    return x[:, :size] if transpose else x[:size]


@pytest.mark.parametrize("division", ["uneven", "all in one"])
def test_codes_are_transposed_and_rows_summed(division: str, card):
    bounds = twin.bounds_of(torch.tensor(DIVISIONS[division]))
    rows = sum(DIVISIONS[division]) + 1
    q, x = torch.randint(0, 256, (rows, 70), dtype=torch.uint8).view(E4M3), torch.randint(-9, 10, (rows, 70)).float()
    card()
    found = quantize_experts.transpose_experts(q, bounds).view(torch.uint8)
    used = 128 * int(bounds[1, -1])
    assert torch.equal(found[:, :used], twin.transpose_experts(q, bounds).view(torch.uint8)[:, :used])
    assert torch.equal(quantize_experts.expert_sums(x, bounds), twin.expert_sums(x, bounds))


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        "current",
        "blockwise",
        *(pytest.param(name, marks=pytest.mark.whole) for name in ("delayed", "rowwise", "squares")),
    ],
)
def test_a_layers_step_is_that_of_its_emulation(recipe: str, card):
    square = fe.Cast(fe.E4M3, fe.PerBlock(32, 32), power_of_2=True)
    squares = fe.Recipe(name="squares", input=square, weight=square, grad_output=square)
    results, there = [], card()
    for backend in ("triton", "reference"):
        torch.manual_seed(0)
        layer = uneven(GroupedLinear(4, 48, 32, recipe=squares if recipe == "squares" else recipe))
        with fe.backend(backend):
            ran = run(layer, [5, 0, 130, 9])
        assert not ran.dw[1].any()
        assert layer.numerics.ran == backend
        slots = fe.scaling_state(layer)
        amaxes = [slots[role].amax for role in ("input", "weight", "grad_output")]
        results.append(((ran.y, ran.x.grad, ran.dw, ran.db), amaxes))
    assert [done.kernel for done in there.done].count("_matmul_kernel") == 3
    # An emulated product is rounded to BF16 at most (a relative error of 2^-8 / sqrt 12, 59 dB), and sums go in another
    # order.
    assert all(sqnr(want, found) > 50 for found, want in zip(results[0][0], results[1][0], strict=True))
    assert results[0][1] == results[1][1]


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


@pytest.mark.slow
def test_large_experts_in_blocks_are_multiplied_by_hoppers_kernel(monkeypatch: pytest.MonkeyPatch):
    """Forward, dgrad and wgrad: the casts leave codes and scales as its copies by TMA want them."""
    monkeypatch.setattr(triton_backend, "no_card", lambda where, oldest=None: None)
    monkeypatch.setattr(Launch, "run", lambda self, seed: Done(self.program.name, 0, 0, 0))
    layer = GroupedLinear(4, 1024, 1536, recipe="blockwise").bfloat16()
    x = torch.zeros(4096, 1024, dtype=torch.bfloat16, requires_grad=True)
    with fe.backend("triton"), emulated(90) as there:
        layer(x, torch.tensor([1000, 0, 96, 3000])).sum().backward()
    matmuls = [done.kernel for done in there.done if "matmul" in done.kernel or "grouped" in done.kernel]
    assert matmuls == ["_matmul_gluon_kernel"] * 3


def _waited(bounds):
    raise AssertionError("the host read where the rows of experts lie")
