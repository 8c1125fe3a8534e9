"""The warp-specialised matmul as machine code for sm_90, since nothing without such a card can run it.

Each variant is compiled from its launcher's own launch.  What orders its warps and TMA: tests/emulated, which runs it.
"""

import functools
import re

import pytest
import torch
from casts import E4M3, E5M2
from triton import knobs

from benchmarks.machine_code import offline, sass
from fp8engine.kernels import matmul as plain
from fp8engine.kernels import matmul_gluon as gluon
from fp8engine.kernels.tuning import Config
from fp8engine.ops import triton_backend
from fp8engine.ops.reference import Operand
from fp8engine.ops.reference.epilogue import Epilogue

SHARED_MEMORY = 232_448  # bytes a program can have on sm_90: 227 KiB
REGISTERS = 65_536  # of a multiprocessor
TILE = Config(128, 128, 128, group_m=8, warps=8, stages=5, parts=4, kernel="gluon")
M, N, K = 4096, 4096, 4096
BIAS_N = torch.empty(N, dtype=torch.bfloat16, device="meta")
CONSUMERS = 2
PRODUCTS = 5  # in a consumer's code: four that go together, and what is left of K, one by one
WGMMAS = 128 // 32  # of a product: each multiplies 32 of K


def operand(rows: int, dtype=E4M3, by_row: bool = False, k: int = K) -> Operand:
    """With one scale, or one a row."""
    scale = torch.empty((rows, 1) if by_row else (), device="meta")
    return Operand(torch.empty(rows, k, dtype=dtype, device="meta"), scale)


def in_groups(rows: int, height: int, cols: int = 128) -> Operand:
    """With a scale per `height` rows and `cols` of K; those of one group of K lie beside one another."""
    scale = torch.empty(K // cols, -(-rows // height), device="meta").t()
    return Operand(torch.empty(rows, K, dtype=E4M3, device="meta"), scale, height, cols)


VARIANTS = {  # name: a, b, epilogue
    "promoted": (operand(M), operand(N), Epilogue()),
    "promoted, E5M2, rows, bias, FP16": (
        operand(M, E5M2, by_row=True),
        operand(N, by_row=True),
        Epilogue(BIAS_N, out=torch.float16),
    ),
    "1x128 by 128x128": (in_groups(M, 1), in_groups(N, 128), Epilogue(BIAS_N)),
    "1x128 by 1x128": (in_groups(M, 1), in_groups(N, 1), Epilogue()),
}


@functools.cache
def machine_code(name: str) -> offline.Compiled:
    a, b, epilogue = VARIANTS[name]
    assert gluon.unsupported(a, b, epilogue, TILE) is None
    with offline.caught(90) as launches:
        y_MN = gluon.matmul_gluon(a, b, epilogue, TILE)
    assert (y_MN.shape, y_MN.dtype) == ((M, N), epilogue.out)
    return launches[0].compile()


@pytest.mark.parametrize("name", VARIANTS)
def test_it_fits_the_card_and_the_main_loop_is_wgmma_that_is_not_serialized(name):
    code = machine_code(name)
    assert code.spills == 0
    assert code.shared <= SHARED_MEMORY
    assert code.registers * 32 * code.warps <= REGISTERS
    loop = sass.main_loop(code.sass)
    assert not code.serialized, code.notes
    assert loop.shapes == ("QGMMA.64x128x32",)
    assert loop.products == (PRODUCTS - 1) * WGMMAS
    # A product begins anew: its first wgmma does not read the accumulator, by a predicate that is false.
    products = [line for line in code.sass.splitlines() if "QGMMA" in line]
    assert len(products) == CONSUMERS * PRODUCTS * WGMMAS
    assert sum("RZ, !UPT" in line for line in products) == CONSUMERS * PRODUCTS
    # Warps deal their registers: the producer's warp is one of a warpgroup's four.
    assert {*re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", code.ptx)} >= {"24", "240"}
    assert REGISTERS >= 32 * (8 * 240 + 4 * 24)
    assert code.warps == 12


@pytest.mark.parametrize("name", VARIANTS)
def test_operands_and_results_travel_by_tma_alone(name):
    code = machine_code(name)
    kinds = sass.accesses(code.ptx)
    assert any(re.match(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global", kind) for kind in kinds)
    assert any(re.match(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", kind) for kind in kinds)
    assert not [kind for kind in kinds if kind.startswith(("st.global", "cp.async.c"))]
    # scales and bias, two columns at most to a load: of a tile's operands a thread would read 16 bytes at once
    assert {kind for kind in kinds if kind.startswith("ld.global")} <= {"ld.global.b32", "ld.global.v2.b32"}
    expected = re.findall(r"arrive\.expect_tx\S* _, \[%r\d+\], (\d+)", code.ptx)
    scale = 4 if name == "1x128 by 1x128" else 0  # bytes a row, which come with the tiles
    assert expected == [str((TILE.block_m + TILE.block_n) * (TILE.block_k + scale))]


GOOD = operand(M)
REASONS = {
    "nothing to multiply": [
        (operand(0), GOOD, Epilogue()),
        (GOOD, operand(0), Epilogue()),
        (operand(M, k=0), operand(N, k=0), Epilogue()),
    ],
    "a is not": [(operand(M, k=K + 1), GOOD, Epilogue()), (GOOD._replace(data=GOOD.data.t()), GOOD, Epilogue())],
    "b is not": [(GOOD, GOOD._replace(data=GOOD.data[:, 1:]), Epilogue())],
    "rows of the result, 41": [(GOOD, operand(4100), Epilogue()), (GOOD, operand(4104), Epilogue(out=E4M3))],
    "groups of 64 along K": [(in_groups(M, 1, 64), in_groups(N, 64, 64), Epilogue())],
    "blocks of 64 rows of b": [(in_groups(M, 1), in_groups(N, 64), Epilogue())],
    "scales of rows are not": [(in_groups(M, 1), in_groups(4002, 1), Epilogue(out=torch.float64))],
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_unsupported_says_why(reason):
    for a, b, epilogue in REASONS[reason]:
        assert str(gluon.unsupported(a, b, epilogue, TILE)).startswith(reason)


def test_what_else_decides_whether_it_is_supported(monkeypatch):
    """Tiles; ragged shapes and padded rows, K = 100 in rows of 128, which TMA fills; the card; the interpreter."""
    found = gluon.unsupported(GOOD, GOOD, Epilogue(), TILE._replace(block_n=256))
    assert str(found).startswith("tiles are (128, 128, 128)")
    padded = operand(100, k=128)
    padded = padded._replace(data=padded.data[:, :100])
    assert gluon.unsupported(padded, operand(8)._replace(data=padded.data[:8]), Epilogue(), TILE) is None
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        assert gluon.unsupported(GOOD, GOOD, Epilogue(), TILE) == "Gluon has no interpreter"
    for capability, reason in {(8, 9): "sm_89", (10, 0): "sm_100", (12, 0): "sm_120"}.items():
        monkeypatch.setattr(gluon, "capability", lambda where, capability=capability: capability)
        assert str(gluon.unsupported(GOOD, GOOD, Epilogue(), TILE)).endswith(reason)


@pytest.mark.parametrize(("setting", "used"), [("0", False), ("1", True), (None, True)])
def test_a_setting_leaves_everything_to_plain_triton(monkeypatch, setting: str | None, used: bool):
    """The launchers are told, and a launcher that is told so does not ask Gluon's kernel."""
    monkeypatch.delenv("FP8ENGINE_GLUON", raising=False)
    if setting is not None:
        monkeypatch.setenv("FP8ENGINE_GLUON", setting)
    a, b = (Operand(torch.empty(64, 64, dtype=E4M3, device="meta"), torch.ones(()), -1, -1) for _ in "ab")
    told = []
    monkeypatch.setattr(triton_backend, "unsupported", lambda a, b: None)
    monkeypatch.setattr(triton_backend, "_launch", lambda *given: told.append(given[-1]))
    triton_backend.matmul(a, b, Epilogue())
    assert told == [used]


@pytest.mark.parametrize(
    ("sums", "allowed", "runs"),
    [("promoted", True, "Gluon"), ("scaled", True, "Gluon"), ("promoted", False, "Triton"), ("kept", True, "Triton")],
)
def test_which_kernel_a_configuration_of_gluon_runs(monkeypatch, sums: str, allowed: bool, runs: str):
    """Triton's where Gluon is switched off, and for sums that are not promoted, which Gluon's has no way to keep."""
    a, b = (in_groups(M, 1), in_groups(N, 128)) if sums == "scaled" else (GOOD, GOOD)
    monkeypatch.setattr(plain, "_launch", lambda *given: "Triton")
    monkeypatch.setattr(gluon, "matmul_gluon", lambda *given: "Gluon")
    assert plain.matmul_fp8(a, b, Epilogue(), sums == "promoted", TILE, allowed) == runs


def test_one_stage_is_refused():
    with offline.caught(90) as launches:
        gluon.matmul_gluon(GOOD, GOOD, Epilogue(), TILE._replace(stages=1))
    with pytest.raises(Exception, match="two products are in flight"):
        launches[0].compile()
