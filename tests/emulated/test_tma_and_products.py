"""TMA, matrix loads and Tensor Core instructions of the emulated card, against NumPy and maps made by brute force."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from emulator.faults import Deadlock, Fault, Misaligned, Race, TensorMapError, Unwritten
from emulator.tma import SPANS, TensorMap, swizzled
from ptx import run

GENERATOR = np.random.default_rng(0)
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
WAIT = "$L{n}: mbarrier.try_wait.parity.shared.b64 %p{n}, [16384], 0; @!%p{n} bra $L{n};"
SEEDS = [None, 1, 2]


def test_a_swizzle_turns_16_byte_pieces_of_8_rows():
    """By brute force: piece p of row r of a span lies at piece p xor (r mod pieces), where 8 rows make a pattern."""
    for span in (32, 64, 128):
        pieces = span // 16
        linear = np.arange(8 * 128)
        for address in range(0, 8 * 128, 16):
            line = address // 128  # shared memory is turned by lines of 128 bytes
            piece = address // 16 % 8
            wanted = line * 128 + (piece ^ line % pieces) * 16
            assert swizzled(np.array([address]), span)[0] == wanted
        assert np.array_equal(np.sort(swizzled(linear, span)), linear)  # no byte is lost


def aligned(shape: tuple[int, ...], dtype: type = np.uint8, to: int = 128) -> np.ndarray:
    """Random bytes at an aligned address."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + to, np.uint8)
    raw = raw[-raw.ctypes.data % to :][:size]
    raw[:] = GENERATOR.integers(0, 256, size)
    return raw.view(dtype).reshape(shape)


def a_map(array: np.ndarray, box: tuple[int, int], swizzle: int = 0) -> TensorMap:
    """Of a matrix of bytes."""
    return TensorMap(array.ctypes.data, array.shape, (array.strides[0], 1), box, 1, swizzle)


def round_trip(
    *, fence: str = "fence.proxy.async.shared::cta;", wait: str = "", last: str = "", between: str = ""
) -> str:
    """Load a box at (x, y) of %rd0, wait, store it at (0, 0) of %rd1; each part can be left out."""
    return f"""
    setp.eq.u32 %p9, %r0, 0;
    @%p9 mbarrier.init.shared::cta.b64 [16384], 1;
    bar.sync 0;
    @%p9 mbarrier.arrive.expect_tx.shared.b64 _, [16384], BYTES;
    @%p9 {LOAD} [0], [%rd0, {{X, Y}}], [16384];
    {wait or WAIT.format(n=3)}
    {between} {fence}
    bar.sync 0;
    @%p9 {STORE} [%rd1, {{0, 0}}], [0];
    @%p9 cp.async.bulk.commit_group;
    {last or "@%p9 cp.async.bulk.wait_group.read 0;"}
    """


def moved(text: str, source, target, box: tuple[int, int], corner=(0, 0), swizzle: int = 0, seed=None) -> None:
    """Run it."""
    text = text.replace("BYTES", str(box[0] * box[1])).replace("X", str(corner[0])).replace("Y", str(corner[1]))
    maps = [a_map(source, box, swizzle), a_map(target, box, swizzle)]
    # Then the arrays that they describe, so that their memory is the launch's.
    run(text, [*maps, source, target], threads=64, shared=16392, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("swizzle", "columns"), [(0, 32), (1, 32), (2, 64), (3, 128)])
def test_a_box_comes_back_with_zeros_outside_of_the_tensor(swizzle: int, columns: int, seed: int | None):
    source, box = aligned((40, 160)), (16, columns)
    for x, y in ((0, 0), (16, 8), (-16, -3), (144, 32)):
        target = aligned((16, columns))
        moved(round_trip(), source, target, box, (x, y), swizzle, seed)
        wanted = np.zeros(box, np.uint8)
        for row, column in itertools.product(range(16), range(columns)):
            if 0 <= y + row < 40 and 0 <= x + column < 160:
                wanted[row, column] = source[y + row, x + column]
        assert np.array_equal(target, wanted), (x, y)


def test_a_swizzled_box_lies_turned_in_shared_memory():
    """Read by ordinary loads: a wrong swizzle of the reader gives other bytes."""
    source, found = aligned((8, 128)), np.zeros(256, np.uint32)
    body = f"""
    setp.eq.u32 %p9, %r0, 0;
    @%p9 mbarrier.init.shared::cta.b64 [16384], 1;
    bar.sync 0;
    @%p9 mbarrier.arrive.expect_tx.shared.b64 _, [16384], 1024;
    @%p9 {LOAD} [0], [%rd0, {{0, 0}}], [16384];
    {WAIT.format(n=3)}
    shl.b32 %r1, %r0, 2; mad.wide.u32 %rd9, %r0, 4, %rd2; ld.shared.b32 %r2, [%r1]; st.global.b32 [%rd9], %r2;
    """
    run(body, [a_map(source, (8, 128), 3), source, found], threads=256, shared=16392)
    turned = np.zeros(1024, np.uint8)
    turned[swizzled(np.arange(1024), 128)] = source.ravel()
    assert np.array_equal(found.view(np.uint8), turned)
    assert not np.array_equal(found.view(np.uint8), source.ravel())


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_missing_between_tma_and_threads_is_named(seed: int | None):
    source = aligned((16, 32))

    def refused(match: str, kind: type[Fault] = Fault, **parts: str) -> None:
        with pytest.raises(kind, match=match):
            moved(round_trip(**parts), source, aligned((16, 32)), (16, 32), seed=seed)

    again = "shl.b32 %r1, %r0, 2; st.shared.b32 [%r1], %r0;"
    moved(round_trip(between=again), source, aligned((16, 32)), (16, 32), seed=seed)
    refused("fence.proxy.async missing", Race, between=again, fence="")  # written by threads, read by TMA
    refused("not ordered|nobody wrote", Fault, wait="bar.sync 0;")  # the copy was not waited for
    refused("no thread had waited for its last TMA store", last="bar.sync 0;")
    late = "bar.sync 0; shl.b32 %r1, %r0, 2; st.shared.b32 [%r1], %r0; @%p9 cp.async.bulk.wait_group.read 0;"
    refused("this write is not ordered after the last asynchronous read", Race, last=late)


# Thread 0 initialises the mbarrier and announces the bytes, thread `by` starts the copy, and all wait for it.
LOADED = f"""
setp.eq.u32 %p8, %r0, {{by}}; setp.eq.u32 %p9, %r0, 0;
@%p9 mbarrier.init.shared::cta.b64 [16384], 1;
@%p9 mbarrier.arrive.expect_tx.shared.b64 _, [16384], {{bytes}};
{{first}}
@%p8 {LOAD} [0], [%rd0, {{{{0, 0}}}}], [16384];
{{wait}}
"""
RIGHT = {"by": "32", "bytes": "512", "first": "bar.sync 0;", "wait": WAIT.format(n=3)}


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_wrong_with_a_load_and_its_mbarrier_is_named(seed: int | None):
    source = aligned((16, 32))

    def loaded(**parts: str) -> None:
        run(LOADED.format(**{**RIGHT, **parts}), [a_map(source, (16, 32)), source], threads=64, shared=16392, seed=seed)

    loaded()
    loaded(by="0", first="", wait="bar.sync 0;" + RIGHT["wait"])
    with pytest.raises(Fault, match=r"nothing orders its initialisation before that|no mbarrier is initialised"):
        loaded(first="")
    with pytest.raises(Deadlock, match=r"wait for \('mbarrier', 16384, 0\)"):
        loaded(bytes="1024")
    with pytest.raises(Fault, match=r"no thread had waited for its last TMA load \(16384\)"):
        loaded(wait="")


RULES = {
    "an address": {"address": 8},
    "at most 256": {"box": (512, 32)},
    "rows of a box in multiples": {"box": (8, 24)},
    "within the swizzle": {"box": (8, 64), "swizzle": 1},
    "strides in multiples": {"strides": (40, 1)},
    "contiguous rows": {"strides": (64, 2)},
    "sizes from 1": {"shape": (0, 64)},
    "below 2\\^40": {"strides": (1 << 41, 1)},
}


@pytest.mark.parametrize("rule", RULES)
def test_a_tensor_map_keeps_the_drivers_rules(rule: str):
    right = {"address": 1 << 20, "shape": (64, 64), "strides": (64, 1), "box": (8, 32), "itemsize": 1, "swizzle": 0}
    TensorMap(**right)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TensorMapError, match=rule):
        TensorMap(**{**right, **RULES[rule]})


def test_a_box_is_aligned_in_shared_memory():
    source = aligned((16, 128))
    for swizzle, base in ((0, 64), (3, 512)):
        with pytest.raises(TensorMapError, match="multiples of"):
            a_map(source, (8, 128), swizzle).place((0, 0), base)


@pytest.mark.parametrize("turned", [False, True])
def test_matrices_of_8_rows_go_to_registers_and_back(turned: bool):
    """Row r of matrix i comes from lane 8 i + r; lane l gets elements 2 l and 2 l + 1, by rows or by columns."""
    source = GENERATOR.integers(0, 1 << 16, (32, 8)).astype(np.uint16)
    trans = ".trans" if turned else ""
    body = f"""
    mad.wide.u32 %rd8, %r0, 16, %rd0; shl.b32 %r1, %r0, 4;
    ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd8]; st.shared.v4.b32 [%r1], {{%r2, %r3, %r4, %r5}};
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r6, %r7, %r8, %r9}}, [%r1];
    mad.wide.u32 %rd9, %r0, 16, %rd1; st.global.v4.b32 [%rd9], {{%r6, %r7, %r8, %r9}};
    bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r1], {{%r6, %r7, %r8, %r9}};
    ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r1];
    mad.wide.u32 %rd9, %r0, 16, %rd2; st.global.v4.b32 [%rd9], {{%r2, %r3, %r4, %r5}};
    """
    flat = aligned((32, 8), np.uint16)
    flat[:] = source
    found, back = (aligned((128,), np.uint32) for _ in range(2))
    run(body, [flat, found, back])
    for matrix, lane in itertools.product(range(4), range(32)):
        block = source[8 * matrix : 8 * matrix + 8]
        block = block.T if turned else block
        first, second = block.reshape(-1)[2 * lane : 2 * lane + 2].tolist()
        assert found[4 * lane + matrix] == second << 16 | first
    assert np.array_equal(back.view(np.uint16).reshape(32, 8), source)
    with pytest.raises(Misaligned, match="a matrix's row"):
        run(body.replace("ldmatrix", "add.s32 %r1, %r1, 8; ldmatrix"), [flat, found, back])


FORMATS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
}


@pytest.mark.parametrize(
    ("k", "kinds"), [(32, ("e4m3", "e4m3")), (32, ("e5m2", "e4m3")), (16, ("bf16", "bf16")), (16, ("f16", "f16"))]
)
def test_a_warps_product_is_numpys(k: int, kinds: tuple[str, str]):
    """Fragments of mma.m16n8k16 and k32 by the tables of the PTX ISA: groups of 4 lanes share a row."""
    a, b = (
        GENERATOR.integers(-3, 4, shape).astype(FORMATS[kind])
        for shape, kind in zip(((16, k), (8, k)), kinds, strict=True)
    )
    c = GENERATOR.integers(-9, 10, (16, 8)).astype(np.float32)
    per = 4 // a.dtype.itemsize
    registers = np.zeros((32, 10), np.uint32)
    for lane in range(32):
        group, place = lane // 4, lane % 4
        for i in range(4):
            first = place * per + (k // 2) * (i // 2)
            registers[lane, i] = a[group + 8 * (i % 2), first : first + per].view(np.uint32)[0]
        for i in range(2):
            first = place * per + (k // 2) * i
            registers[lane, 4 + i] = b[group, first : first + per].view(np.uint32)[0]
        for i in range(4):
            registers[lane, 6 + i] = c[group + 8 * (i // 2), 2 * place + i % 2 : 2 * place + i % 2 + 1].view(np.uint32)[
                0
            ]
    loads = "\n".join(f"ld.global.b32 %r{10 + i}, [%rd8+{4 * i}];" for i in range(10))
    stores = "\n".join(f"st.global.b32 [%rd9+{4 * i}], %r{30 + i};" for i in range(4))
    name = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kinds[0]}.{kinds[1]}.f32"
    out = np.zeros((32, 4), np.float32)
    run(
        f"""mad.wide.u32 %rd8, %r0, 40, %rd0; mad.wide.u32 %rd9, %r0, 16, %rd1; {loads}
        {name} {{%r30, %r31, %r32, %r33}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}};
        {stores}""",
        [registers, out],
    )
    wanted = a.astype(np.float64) @ b.astype(np.float64).T + c
    for lane, i in itertools.product(range(32), range(4)):
        assert out[lane, i] == wanted[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]


def descriptor(start: int, leading: int, stride: int, swizzle: int) -> int:
    """A matrix descriptor (PTX ISA, 9.7.15.5.1): addresses in units of 16 bytes."""
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | {0: 0, 3: 1, 2: 2, 1: 3}[swizzle] << 62


FENCE, WAIT_ALL = "wgmma.fence.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"


def wgmma(a: str, descriptors: tuple[int, int], *, before: str, fence: str = FENCE, wait: str = WAIT_ALL) -> str:
    """A 64x8 product of E4M3 by one warpgroup: operands by `before`, sums to %rd2."""
    sums = ", ".join(f"%r{100 + i}" for i in range(4))
    zeros = " ".join(f"mov.b32 %r{100 + i}, 0;" for i in range(4))
    stores = " ".join(f"st.global.b32 [%rd9+{4 * i}], %r{100 + i};" for i in range(4))
    return f"""{before} {zeros} mov.b64 %rd20, {descriptors[0]}; mov.b64 %rd21, {descriptors[1]}; mov.pred %p5, 1;
    {fence}
    wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {{{sums}}}, {a}, %rd21, %p5, 1, 1;
    wgmma.commit_group.sync.aligned;
    {wait}
    mad.wide.u32 %rd9, %r0, 16, %rd2; {stores}"""


def spread_over(a: np.ndarray, b: np.ndarray, swizzle: int) -> np.ndarray:
    """The bytes of shared memory: a [64, 32] at 0, b [8, 32] at 8192, rows of 8 by 8, K along the swizzle's span."""
    memory = np.zeros(9216, np.uint8)
    for matrix, base in ((a, 0), (b, 8192)):
        for row, byte in itertools.product(range(matrix.shape[0]), range(32)):
            if swizzle == 0:  # core matrices of 8 rows of 16 bytes, the two of K 128 bytes apart, the next rows 256
                linear = base + row // 8 * 256 + byte // 16 * 128 + row % 8 * 16 + byte % 16
            else:
                linear = base + row * SPANS[swizzle] + byte
            memory[swizzled(np.array([linear]), SPANS[swizzle])[0]] = matrix[row, byte]
    return memory


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
def test_a_warpgroups_product_is_numpys_under_every_swizzle(swizzle: int):
    a, b = (GENERATOR.integers(-3, 4, (rows, 32)).astype(FORMATS["e4m3"]) for rows in (64, 8))
    memory = aligned((9216,))
    memory[:] = spread_over(a.view(np.uint8), b.view(np.uint8), swizzle)
    copies = """
    mov.b32 %r1, 0;
    $C: shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1; cvt.u64.u32 %rd7, %r2; add.s64 %rd8, %rd0, %rd7;
    ld.global.b32 %r3, [%rd8]; st.shared.b32 [%r2], %r3;
    add.s32 %r1, %r1, 512; setp.lt.u32 %p1, %r1, 9216; @%p1 bra $C;
    """
    stride = 8 * SPANS[swizzle] if swizzle else 256
    both = descriptor(0, 128, stride, swizzle), descriptor(8192, 128, stride, swizzle)
    out = np.zeros((128, 4), np.float32)
    fenced = copies + "fence.proxy.async.shared::cta; bar.sync 0;"
    run(wgmma("%rd20", both, before=fenced), [memory, memory, out], threads=128, shared=9216)
    wanted = a.astype(np.float64) @ b.astype(np.float64).T
    for thread, i in itertools.product(range(128), range(4)):
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2)
        assert out[thread, i] == wanted[row, 2 * (thread % 4) + i % 2]
    if swizzle:  # the wrong one of the other spans reads other bytes
        other = descriptor(0, 128, stride, 4 - swizzle if swizzle != 2 else 1), both[1]
        wrong = np.zeros((128, 4), np.float32)
        run(wgmma("%rd20", other, before=fenced), [memory, memory, wrong], threads=128, shared=9216)
        assert not np.array_equal(wrong, out)
    for before, match in ((copies + "bar.sync 0;", "fence.proxy.async"), (copies, "not ordered")):
        with pytest.raises((Race, Unwritten), match=match):
            run(wgmma("%rd20", both, before=before), [memory, memory, out], threads=128, shared=9216)
    for wait in ("", "wgmma.wait_group.sync.aligned 1;"):
        with pytest.raises(Fault, match="before the wgmma that works on it was waited for"):
            run(wgmma("%rd20", both, before=fenced, wait=wait), [memory, memory, out], threads=128, shared=9216)
    with pytest.raises(Fault, match=r"%r100 was written since the last wgmma.fence"):
        run(wgmma("%rd20", both, before=fenced, fence=""), [memory, memory, out], threads=128, shared=9216)
