"""The warp-specialised fast matmul as machine code for sm_90, since nothing without such a card can run it.

Each variant is compiled from its launcher's own launch.  Its order of barriers is read from the PTX, a letter each:

    W  wgmma.wait_group      A  mbarrier.arrive: one thread speaks for all warps      B  barrier of the eight warps
    R  TMA has read the staging buffer      X  write into it      F  fence towards TMA      S  TMA store
"""

import gc
import re
import weakref

import pytest
import torch
from casts import E4M3, E5M2
from triton import knobs

from benchmarks.machine_code import offline, sass
from fp8engine.kernels import gluon_ring
from fp8engine.kernels import matmul as plain
from fp8engine.kernels import matmul_gluon as gluon
from fp8engine.kernels import matmul_gluon_scaled as gluon_scaled
from fp8engine.kernels.tuning import Config
from fp8engine.ops import triton_backend
from fp8engine.ops.reference import Operand
from fp8engine.ops.reference.epilogue import Epilogue

SHARED_MEMORY = 232_448  # bytes a program can have on sm_90: 227 KiB
REGISTERS = 65_536  # of a multiprocessor
WIDE = Config(128, 256, 128, group_m=8, warps=8, stages=4, parts=2, kernel="gluon")
SQUARE = Config(128, 128, 128, group_m=8, warps=8, stages=4, parts=1, kernel="gluon")
M, N, K = 4096, 4096, 4096
BIAS_N = torch.empty(N, dtype=torch.bfloat16, device="meta")

# name: configuration, by row, dtypes of a and b, epilogue
VARIANTS = {
    "fast": (WIDE, False, (E4M3, E4M3), Epilogue()),
    "fast, rows, bias": (WIDE, True, (E4M3, E4M3), Epilogue(BIAS_N)),
    "fast, E5M2, FP16": (WIDE, False, (E5M2, E4M3), Epilogue(out=torch.float16)),
    "fast, 128x128": (SQUARE, False, (E4M3, E4M3), Epilogue(BIAS_N)),
}
LONGEST = 60  # SASS instructions of a main loop
EVENTS = {
    "W": r"wgmma\.wait_group",
    "A": r"mbarrier\.arrive\.shared",
    "B": r"bar\.sync\s+0, 256;",
    "R": r"cp\.async\.bulk\.wait_group\.read",
    "X": r"stmatrix",
    "F": r"fence\.proxy\.async",
    "S": r"cp\.async\.bulk\.tensor\.2d\.global\.shared",
}
_compiled: dict[str, offline.Compiled] = {}


def operand(rows: int, dtype=E4M3, by_row: bool = False, k: int = K) -> Operand:
    scale = torch.empty((rows, 1) if by_row else (), device="meta")
    return Operand(torch.empty(rows, k, dtype=dtype, device="meta"), scale)


@pytest.fixture(params=VARIANTS)
def variant(request) -> tuple[str, offline.Compiled]:
    """A variant's name and machine code, made once."""
    name = request.param
    if name not in _compiled:
        config, by_row, (dtype_a, dtype_b), epilogue = VARIANTS[name]
        a, b = operand(M, dtype_a, by_row), operand(N, dtype_b, by_row)
        assert gluon.unsupported(a, b, epilogue) is None
        with offline.caught(90) as launches:
            y_MN = gluon.matmul_gluon(a, b, epilogue, config)
        assert (y_MN.shape, y_MN.dtype) == ((M, N), epilogue.out)
        _compiled[name] = launches[0].compile()
    return name, _compiled[name]


def events(ptx: str) -> str:
    """The consumers' events in order, a letter each."""
    found = re.finditer("|".join(f"(?P<{letter}>{text})" for letter, text in EVENTS.items()), ptx)
    return "".join(str(match.lastgroup) for match in found)


@pytest.mark.slow
def test_fits_the_card(variant):
    _, code = variant
    assert code.spills == 0
    assert code.shared <= SHARED_MEMORY
    assert code.registers * 32 * code.warps <= REGISTERS


def test_the_main_loop_is_wgmma_that_is_not_serialized(variant):
    name, code = variant
    config, *_ = VARIANTS[name]
    loop = sass.main_loop(code.sass)
    assert not code.serialized, code.notes
    assert loop.shapes == (f"QGMMA.64x{config.block_n}x32",)
    assert loop.products == config.block_k // 32
    assert loop.length <= LONGEST


def test_warps_deal_their_registers(variant):
    _, code = variant
    given = set(re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", code.ptx))
    assert given == {"24", "240"}
    assert REGISTERS >= 32 * (8 * 240 + 4 * 24)  # the producer's warp is one of a warpgroup's four
    assert code.warps == 12


def test_operands_and_results_travel_by_tma_alone(variant):
    name, code = variant
    config, *_ = VARIANTS[name]
    kinds = sass.accesses(code.ptx)
    assert any(re.match(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global", kind) for kind in kinds)
    assert any(re.match(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", kind) for kind in kinds)
    assert not [kind for kind in kinds if kind.startswith(("st.global", "cp.async.c"))]
    # scales and bias, two columns at most to a load: of a tile's operands a thread would read 16 bytes at once
    assert {kind for kind in kinds if kind.startswith("ld.global")} <= {"ld.global.b32", "ld.global.v2.b32"}
    expected = re.findall(r"arrive\.expect_tx\S* _, \[%r\d+\], (\d+)", code.ptx)
    assert expected == [str((config.block_m + config.block_n) * config.block_k)]


def test_a_slot_is_given_back_after_all_warps_products(variant):
    _, code = variant
    order = re.sub("[^WAB]", "", events(code.ptx))
    assert order.count("A") == 2  # in the loop, and after it
    assert len(re.findall("WBA", order)) == order.count("A")


def test_a_staged_piece_is_read_before_the_next_and_fenced(variant):
    name, code = variant
    config, *_ = VARIANTS[name]
    order = re.sub("[WA]", "", events(code.ptx))
    assert order.count("S") == config.parts
    assert len(re.findall("RBX+FBS", order)) == config.parts
    assert order.rstrip("B").endswith("R")  # shared memory is kept until TMA has read the last piece


def test_a_sum_begins_anew(variant):
    """The first wgmma of a sum must not read the accumulator: a predicate in the loop."""
    _, code = variant
    products = [line for line in code.sass.splitlines() if "QGMMA" in line]
    assert sum(re.search(r"R\d+, U?P\d", line) is not None for line in products) == len(products) // 4 == 1


GOOD = operand(M)
REASONS = {
    "nothing to multiply": [
        (operand(0), GOOD, Epilogue()),
        (GOOD, operand(0), Epilogue()),
        (operand(M, k=0), operand(N, k=0), Epilogue()),
    ],
    "a is not": [(operand(M, k=K + 1), GOOD, Epilogue()), (GOOD._replace(data=GOOD.data.t()), GOOD, Epilogue())],
    "b is not": [(GOOD, GOOD._replace(data=GOOD.data[:, 1:]), Epilogue())],
    "rows of the result, 4100": [(GOOD, operand(4100), Epilogue())],
    "the result is not of 16 bits": [
        (GOOD, GOOD, Epilogue(out=torch.float32)),
        (GOOD, GOOD, Epilogue(out=E4M3, scale=torch.empty(1, device="meta"))),
    ],
    "activation relu": [(GOOD, GOOD, Epilogue(activation="relu"))],
    "a scale": [(GOOD, GOOD, Epilogue(scale=torch.empty(1, device="meta")))],
    "statistics": [
        (GOOD, GOOD, Epilogue(amax=torch.empty(1, device="meta"))),
        (GOOD, GOOD, Epilogue(counts=torch.empty(2, device="meta"))),
    ],
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_unsupported_says_why(reason):
    for a, b, epilogue in REASONS[reason]:
        assert str(gluon.unsupported(a, b, epilogue)).startswith(reason)


def test_ragged_shapes_and_padded_rows_are_supported():
    padded = operand(100, k=128)
    padded = padded._replace(data=padded.data[:, :100])  # K = 100 in rows of 128: TMA fills with zeros
    assert gluon.unsupported(padded, operand(8)._replace(data=padded.data[:8]), Epilogue()) is None


@pytest.mark.parametrize(("setting", "used"), [("0", False), ("1", True), (None, True)])
def test_a_setting_leaves_everything_to_plain_triton(monkeypatch, setting: str | None, used: bool):
    """The launchers are told, and a launcher that is told so does not ask Gluon's kernel."""
    monkeypatch.delenv("FP8ENGINE_GLUON", raising=False)
    if setting is not None:
        monkeypatch.setenv("FP8ENGINE_GLUON", setting)
    a, b = (Operand(torch.empty(64, 64, dtype=E4M3, device="meta"), torch.ones(()), -1, -1) for _ in "ab")
    told = []
    monkeypatch.setattr(triton_backend, "unsupported", lambda a, b: None)
    monkeypatch.setattr(triton_backend, "_kernel", lambda *name: lambda *given: told.append(given[-1]))
    triton_backend.matmul(a, b, Epilogue())
    assert told == [used]


@pytest.mark.parametrize("scale", [torch.ones(()), torch.ones(64, 1)])
def test_without_gluon_a_launcher_runs_its_own_kernel(monkeypatch, scale):
    a, b = (Operand(torch.empty(64, 64, dtype=E4M3, device="meta"), scale, 1, 64) for _ in "ab")

    class Own(Exception):
        pass

    def own(*sizes):
        raise Own

    monkeypatch.setattr(plain, "sums_of", own)
    monkeypatch.setattr(gluon_scaled, "unsupported", lambda *given: None)
    monkeypatch.setattr(gluon, "unsupported", lambda *given: None)
    config = Config(128, 128, 128, kernel="gluon")
    with pytest.raises(Own):
        plain.matmul_fp8(a, b, Epilogue(), config=config, gluon=False)


def test_a_result_that_is_added_to_is_left_to_plain_triton(monkeypatch):
    a, b = (Operand(torch.empty(64, 64, dtype=E4M3, device="meta"), torch.ones(()), -1, -1) for _ in "ab")
    monkeypatch.setattr(gluon_ring, "capability", lambda where: (9, 0))
    into = torch.empty(64, 64, device="meta")
    assert "added to" in str(gluon_ring.unsupported(a, b, Epilogue(out=torch.float32, into=into)))


def test_only_hopper_is_supported(monkeypatch):
    for capability, reason in {(8, 9): "sm_89", (10, 0): "sm_100", (12, 0): "sm_120"}.items():
        monkeypatch.setattr(gluon_ring, "capability", lambda where, capability=capability: capability)
        assert str(gluon.unsupported(GOOD, GOOD, Epilogue())).endswith(reason)


def test_the_interpreter_is_not_supported():
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        assert gluon.unsupported(GOOD, GOOD, Epilogue()) == "Gluon has no interpreter"


def test_one_stage_is_refused():
    with offline.caught(90) as launches:
        gluon.matmul_gluon(GOOD, GOOD, Epilogue(), SQUARE._replace(stages=1))
    with pytest.raises(Exception, match="two products are in flight"):
        launches[0].compile()


def test_descriptors_are_kept_and_tensors_are_not():
    x = torch.empty(256, 128, dtype=E4M3)
    first = gluon.descriptor(x, (128, 128))
    assert gluon.descriptor(x.view(256, 128), (128, 128)) is first
    assert gluon.descriptor(x, (64, 128)) is not first
    assert gluon.descriptor(x.view(E5M2), (128, 128)) is not first
    assert gluon.descriptor(x[:128], (128, 128)) is not first
    assert first.base.data_ptr() == x.data_ptr()
    assert (first.layout.swizzle_byte_width, first.layout.element_bitwidth) == (128, 8)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
