"""The emulated card's instructions against NumPy and ml_dtypes: chosen values, and every 16-bit value of a cvt."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from emulator import forms
from emulator.arithmetic import RULES
from emulator.faults import Fault, UnknownInstruction
from emulator.reader import read
from ptx import run, several
from ptx import text as module

GENERATOR = np.random.default_rng(0)
EDGES = np.array([0, 1, 2, 31, 32, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint32)
WORDS = np.concatenate([EDGES, GENERATOR.integers(0, 1 << 32, 120, np.uint32)])
OTHER = GENERATOR.permutation(WORDS)
SMALL, LARGE = 2.0**-126, 3.4e38
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, SMALL / 8, -SMALL / 8, LARGE, 448.0, 449.0, SMALL], np.float32
)
USUAL = GENERATOR.standard_normal(115) * 2.0 ** GENERATOR.integers(-40, 40, 115)
REALS = np.concatenate([SPECIAL, USUAL.astype(np.float32)])
SECOND = GENERATOR.permutation(REALS)
EVERY_16 = np.arange(1 << 16, dtype=np.uint16)
INTEGERS = {
    "add.s32 OUT, IN0, IN1;": lambda a, b: a + b,
    "sub.s32 OUT, IN0, IN1;": lambda a, b: a - b,
    "mul.lo.s32 OUT, IN0, IN1;": lambda a, b: a * b,
    "mul.hi.u32 OUT, IN0, IN1;": lambda a, b: (a.astype(np.uint64) * b >> 32).astype(np.uint32),
    "and.b32 OUT, IN0, IN1;": lambda a, b: a & b,
    "or.b32 OUT, IN0, IN1;": lambda a, b: a | b,
    "xor.b32 OUT, IN0, IN1;": lambda a, b: a ^ b,
    "min.s32 OUT, IN0, IN1;": lambda a, b: np.minimum(a.view(np.int32), b.view(np.int32)),
    "max.s32 OUT, IN0, IN1;": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)),
    "max.relu.s32 OUT, IN0, IN1;": lambda a, b: np.maximum(np.maximum(a.view(np.int32), b.view(np.int32)), 0),
    "min.u32 OUT, IN0, IN1;": np.minimum,
    "shl.b32 OUT, IN0, 31;": lambda a, b: a << 31,
    "shl.b32 OUT, IN0, 32;": lambda a, b: a * 0,
    "shr.u32 OUT, IN0, 5;": lambda a, b: a >> 5,
    "shr.s32 OUT, IN0, 40;": lambda a, b: a.view(np.int32) >> 31,
    "shf.l.wrap.b32 OUT, IN0, IN1, 37;": lambda a, b: b << 5 | a >> 27,
    "shf.r.wrap.b32 OUT, IN0, IN1, 5;": lambda a, b: b << 27 | a >> 5,
    "neg.s32 OUT, IN0;": lambda a, b: -a.view(np.int32),
    "abs.s32 OUT, IN0;": lambda a, b: np.abs(a.view(np.int32)),
    "not.b32 OUT, IN0;": lambda a, b: ~a,
    "popc.b32 OUT, IN0;": lambda a, b: np.array([int(each).bit_count() for each in a]),
    "bfe.u32 OUT, IN0, 4, 7;": lambda a, b: a >> 4 & 127,
    "bfe.s32 OUT, IN0, 4, 7;": lambda a, b: (a << 21).view(np.int32) >> 25,
    "bfi.b32 OUT, IN0, IN1, 8, 8;": lambda a, b: b & 0xFFFF00FF | (a & 255) << 8,
    "prmt.b32 OUT, IN0, IN1, 0x7531U;": lambda a, b: _bytes(a, b, 1, 3, 5, 7),
    "prmt.b32 OUT, IN0, IN1, 0x3340U;": lambda a, b: _bytes(a, b, 0, 4, 3, 3),
    "mad.lo.s32 OUT, IN0, IN1, IN0;": lambda a, b: a * b + a,
    "selp.b32 OUT, IN0, IN1, 1;": lambda a, b: a,
}


def _bytes(a: np.ndarray, b: np.ndarray, *which: int) -> np.ndarray:
    both = np.stack([a, b], 1).view(np.uint8)
    return np.ascontiguousarray(both[:, list(which)]).view(np.uint32).ravel()


@pytest.mark.parametrize("instruction", INTEGERS)
def test_integer_arithmetic(instruction: str):
    with np.errstate(all="ignore"):
        wanted = INTEGERS[instruction](WORDS, OTHER)
    assert np.array_equal(
        several(instruction, [WORDS, OTHER], 4), np.asarray(wanted).astype(np.int64).astype(np.uint32)
    )


@pytest.mark.parametrize("instruction", ["div", "rem"])
def test_integer_division_rounds_toward_zero(instruction: str):
    by = np.where(OTHER == 0, 7, OTHER).astype(np.uint32)
    wide = WORDS.view(np.int32).astype(np.int64), by.view(np.int32).astype(np.int64)
    quotient = np.trunc(wide[0] / wide[1]).astype(np.int64)  # of 32-bit numbers: exact in float64
    wanted = quotient if instruction == "div" else wide[0] - quotient * wide[1]
    assert np.array_equal(several(f"{instruction}.s32 OUT, IN0, IN1;", [WORDS, by], 4), wanted.astype(np.uint32))


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_wide_products(kind: str):
    dtype, wide = (np.int32, np.int64) if kind == "s32" else (np.uint32, np.uint64)
    with np.errstate(over="ignore"):
        wanted = WORDS.view(dtype).astype(wide) * OTHER.view(dtype).astype(wide)
    assert np.array_equal(several(f"mul.wide.{kind} OUT, IN0, IN1;", [WORDS, OTHER], 8, "rd"), wanted.view(np.uint64))


FLOATS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div.rn": np.divide, "max": np.fmax, "min": np.fmin}


@pytest.mark.parametrize("ftz", [False, True], ids=["", "ftz"])
@pytest.mark.parametrize("name", FLOATS)
def test_fp32_arithmetic(name: str, ftz: bool):
    a, b = (_flushed(x) if ftz else x for x in (REALS, SECOND))
    with np.errstate(all="ignore"):
        wanted = FLOATS[name](a, b)
    wanted = _flushed(wanted) if ftz else wanted
    found = several(f"{name}{'.ftz' if ftz else ''}.f32 OUT, IN0, IN1;", [REALS, SECOND], 4).view(np.float32)
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    assert same.all()
    signs = ~np.isnan(wanted) & ~((wanted == 0) & np.isin(name, ("max", "min")))
    assert (np.signbit(found) == np.signbit(wanted))[signs].all()


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


def test_the_larger_of_two_zeros_is_the_positive_one():
    a, b = np.array([0.0, -0.0], np.float32), np.array([-0.0, 0.0], np.float32)
    assert several("max.f32 OUT, IN0, IN1;", [a, b], 4).tolist() == [0, 0]
    assert several("min.f32 OUT, IN0, IN1;", [a, b], 4).tolist() == [1 << 31, 1 << 31]


def test_two_bf16_products_are_rounded_once():
    """A product of two BF16 numbers is exact in FP32 where it is normal, and rounded to BF16 from there."""
    bits = GENERATOR.integers(0, 1 << 16, (2, 256)).astype(np.uint16)
    with np.errstate(all="ignore"):
        a, b = (numbers.view(ml_dtypes.bfloat16).astype(np.float64) for numbers in bits)
        wanted = (a * b).astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
        found = several("mul.bf16x2 OUT, IN0, IN1;", [pair.view(np.uint32) for pair in bits], 4)
        ours = found.view(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    normal = np.abs(wanted) >= 2.0**-120
    assert np.array_equal(ours[normal], wanted[normal])
    assert np.array_equal(np.isnan(ours), np.isnan(wanted))


def test_fma_rounds_once():
    """Against integers: x y + z with exponents aside is an integer, which Python's fractions round exactly."""
    from fractions import Fraction

    a, b, c = (GENERATOR.standard_normal(128).astype(np.float32) for _ in range(3))
    c[:64] = -(a * b)[:64]  # cancellation leaves the product's own rounding error, which two roundings lose
    c[64:96] *= np.float32(2.0**24)
    found = several("fma.rn.f32 OUT, IN0, IN1, IN2;", [a, b, c], 4).view(np.float32)
    for x, y, z, got in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        below, above = np.nextafter(got, np.float32(-np.inf)), np.nextafter(got, np.float32(np.inf))
        error = abs(Fraction(float(got)) - exact)
        assert error <= abs(Fraction(float(below)) - exact)
        assert error <= abs(Fraction(float(above)) - exact)


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_of_numbers_and_of_nans(name: str):
    nan = np.isnan(REALS) | np.isnan(SECOND)
    ordered = COMPARISONS[name](REALS, SECOND) & ~nan
    for text, wanted in ((name, ordered), (f"{name}u", ordered | nan)):
        found = several(f"setp.{text}.f32 %p1, IN0, IN1; selp.b32 OUT, 1, 0, %p1;", [REALS, SECOND], 4)
        assert np.array_equal(found, wanted), text
    found = several(f"setp.{name}.s32 %p1, IN0, IN1; selp.b32 OUT, 1, 0, %p1;", [WORDS, OTHER], 4)
    assert np.array_equal(found, COMPARISONS[name](WORDS.view(np.int32), OTHER.view(np.int32)))


FP8 = {"e4m3": (ml_dtypes.float8_e4m3fn, 448), "e5m2": (ml_dtypes.float8_e5m2, 57344)}


@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize("source", ["bf16", "f16"])
def test_every_16_bit_value_to_fp8(source: str, format: str):
    dtype, largest = FP8[format]
    values = EVERY_16.view(ml_dtypes.bfloat16 if source == "bf16" else np.float16).astype(np.float32)
    with np.errstate(invalid="ignore"):
        wanted = np.clip(values, -largest, largest).astype(dtype).view(np.uint8)
    wanted = np.where(np.isnan(values), 0x7F, wanted)
    for part in np.array_split(np.arange(1 << 16), 64):  # 1024 threads a CTA
        found = several(f"cvt.rn.satfinite.{format}x2.f32 OUT, 0f00000000, IN0;", [values[part]], 2, "rs")
        assert np.array_equal(found, wanted[part])
        if source == "f16":
            pairs = EVERY_16[part].astype(np.uint32)
            found = several(f"cvt.rn.satfinite.{format}x2.f16x2 OUT, IN0;", [pairs], 2, "rs")
            assert np.array_equal(found, wanted[part])


def test_every_bf16_and_fp16_value_is_converted_back_to_itself():
    for part in np.array_split(EVERY_16, 64):
        for kind, dtype in (("bf16", ml_dtypes.bfloat16), ("f16", np.float16)):
            number = part.view(dtype).astype(np.float32)
            wide = several(f"cvt.f32.{kind} OUT, IN0;", [part], 4).view(np.float32)
            assert ((wide == number) | np.isnan(number)).all()
            back = several(f"cvt.rn.{kind}.f32 OUT, IN0;", [number], 2, "rs")
            assert np.array_equal(back, np.where(np.isnan(number), 0x7FFF, part))


def test_fp32_is_rounded_to_16_bits_as_numpy_does():
    near = (
        EVERY_16.astype(np.uint32) << 16 | GENERATOR.choice([0x7FFF, 0x8000, 0x8001], 1 << 16).astype(np.uint32)
    ).view(np.float32)
    near = near[~np.isnan(near)][:2048]
    for kind, dtype in (("bf16", ml_dtypes.bfloat16), ("f16", np.float16)):
        with np.errstate(over="ignore"):
            wanted = near.astype(dtype).view(np.uint16)
        found = np.concatenate([several(f"cvt.rn.{kind}.f32 OUT, IN0;", [part], 2, "rs") for part in np.split(near, 2)])
        assert np.array_equal(found, wanted)


def test_shuffles_votes_and_reductions():
    lanes = np.arange(32, dtype=np.uint32)
    x = GENERATOR.permutation(32).astype(np.uint32)
    assert np.array_equal(several("shfl.sync.bfly.b32 OUT, IN0, 5, 31, -1;", [x], 4), x[lanes ^ 5])
    assert np.array_equal(several("shfl.sync.idx.b32 OUT, IN0, 7, 31, -1;", [x], 4), np.full(32, x[7]))
    assert (several("redux.sync.add.s32 OUT, IN0, -1;", [x], 4) == x.sum()).all()
    assert (several("redux.sync.max.s32 OUT, IN0, -1;", [x], 4) == 31).all()
    in_register = "mov.b32 %r60, {}; redux.sync.add.s32 OUT, IN0, %r60;"  # ptxas is given either
    assert (several(in_register.format("-1"), [x], 4) == x.sum()).all()
    with pytest.raises(Fault, match="redux of a part of a warp"):
        several(in_register.format("15"), [x], 4)
    ballot = several("setp.lt.u32 %p1, IN0, 4; vote.sync.ballot.b32 OUT, %p1, -1;", [x], 4)
    assert (ballot == (np.where(x < 4, 1, 0) << lanes).sum()).all()
    elected = several("elect.sync %r60|%p1, -1; selp.b32 OUT, 1, 0, %p1;", [x], 4)
    assert elected.sum() == 1


def test_branches_of_lanes_meet_again():
    body = "setp.lt.u32 %p1, IN0, 16; @%p1 bra $A; mov.b32 OUT, 7; bra.uni $B; $A: mov.b32 OUT, 5; $B:"
    found = several(body, [np.arange(32, dtype=np.uint32)], 4)
    assert found.tolist() == [5] * 16 + [7] * 16


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.wait.st.sync.aligned;",
        "add.rz.f32 %r1, %r2, %r3;",
        "mul.hi.s64 %rd1, %rd2, %rd3;",
        "ld.local.b32 %r1, [%rd1];",
        "shfl.sync.up.b32 %r1, %r2, 1, 0, -1;",
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%rd1, {%r1, %r2, %r3}], [%r4];",
        "mov.b32 %q1, 0;",
        "shfl.sync.idx.b32 %r1, %r2, 0, 31, 15;",  # a part of a warp, as below
        "elect.sync %r1|%p1, 1;",
    ],
)
def test_an_unknown_instruction_is_an_error_that_names_it(text: str):
    with pytest.raises(UnknownInstruction, match=text.split()[0].rstrip(";").replace(".", r"\.") + "|%q1"):
        run(text, [np.zeros(1, np.uint32)])


QUALIFIERS = {
    "ld.relaxed.gpu.global.b32 %r1, [%rd0];": "relaxed of ld",
    "ld.global.nc.b32 %r1, [%rd0];": "nc of ld",
    "ld.global.v8.b32 %r1, [%rd0];": "v8 of ld",
    "ld.volatile.shared.b32 %r1, [0];": "volatile of ld",
    "ld.shared::cluster.b32 %r1, [0];": "shared::cluster of ld",
    "st.global.release.b32 [%rd0], %r1;": "release of st",
    "add.sat.s32 %r1, %r2, %r3;": "sat of add",
    "add.cc.s32 %r1, %r2, %r3;": "cc of add",
    "add.f64 %rd1, %rd2, %rd3;": "f64 of add",
    "max.NaN.f32 %r1, %r2, %r3;": "NaN of max",
    "fma.rz.f32 %r1, %r2, %r3, %r4;": "rz of fma",
    "fma.rn.relu.f32 %r1, %r2, %r3, %r4;": "relu of fma",
    "mul.rn.sat.f32 %r1, %r2, %r3;": "sat of mul",
    "mad.lo.sat.s32 %r1, %r2, %r3, %r4;": "sat of mad",
    "ex2.f32 %r1, %r2;": "f32 of ex2",
    "setp.eq.and.s32 %p1, %r1, %r2, %p2;": "and of setp",
    "cvt.rz.bf16x2.f32 %r1, %r2, %r3;": "bf16x2 of cvt",
    "cvt.rn.relu.bf16.f32 %rs1, %r2;": "relu of cvt",
    "cvt.rn.f16x2.f32.rs %r1, %r2, %r3;": "rs of cvt",
    "cvt.sat.u8.s32 %rs1, %r2;": "sat of cvt",
    "shf.l.clamp.b32 %r1, %r2, %r3, 5;": "clamp of shf",
    "prmt.b32.f4e %r1, %r2, %r3, %r4;": "f4e of prmt",
    "atom.global.gpu.acquire.add.u32 %r1, [%rd0], 1;": "acquire of atom",
    "atom.global.cta.acq_rel.add.u32 %r1, [%rd0], 1;": "cta of atom",
    "atom.global.gpu.relaxed.cas.b32 %r1, [%rd0], 1, 2;": "cas of atom",
    "red.global.gpu.relaxed.add.noftz.f16x2 [%rd0], 1;": "noftz of red",
    "bar.red.popc.u32 %r1, 0, %p1;": "red of bar",
    "mbarrier.try_wait.shared.b64 %p1, [0], %rd1;": "shared of mbarrier",
    "mbarrier.try_wait.parity.relaxed.cta.shared.b64 %p1, [0], 0;": "relaxed of mbarrier",
    "mbarrier.arrive.noComplete.shared.b64 %rd1, [0], 1;": "noComplete of mbarrier",
    "mbarrier.arrive.b64 %rd1, [%rd0];": "b64 of mbarrier",
    "fence.proxy.async.global;": "global of fence",
    "fence.proxy.tensormap::generic.release.gpu;": "tensormap::generic of fence",
    "fence.acq_rel;": "a shorter fence",
    "membar;": "a shorter membar",
    "barrier.cluster.wait;": "cluster of barrier",
    "mapa.u64 %rd1, %rd0, 1;": "mapa",
    "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [0];": "relaxed of mbarrier",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
    "[0], [%rd0, {%r1, %r2}], [8], %rs1;": "multicast::cluster of cp",
    "cp.async.ca.shared.global.L2::cache_hint [0], [%rd0], 16, %rd1;": "L2::cache_hint of cp",
    "cp.async.mbarrier.arrive.shared.b64 [0];": "mbarrier of cp",
    "cp.async.wait_all;": "wait_all of cp",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd0], [0], 16;": "reduce of cp",
    "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [0];": "m16n16 of ldmatrix",
    "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1}, {%r2}, {%r3}, {%r4};": "f16 of mma",
    "wgmma.mma_async.sp.sync.aligned.m64n8k64.f32.e4m3.e4m3 {%r1}, %rd1, %rd2, %r3, 0, 1, 1, 1;": "sp of wgmma",
    "redux.sync.min.abs.f32 %r1, %r2, -1;": "abs of redux",
    "griddepcontrol.later;": "later of griddepcontrol",
    "lop3.b32 %r1, %r2, %r3, %r4, 0xc0;": "lop3",
}


@pytest.mark.parametrize("text", QUALIFIERS)
def test_an_unknown_qualifier_of_a_known_instruction_is_an_error_that_names_both(text: str):
    opcode = re.escape(text.split()[0].rstrip(";"))
    with pytest.raises(UnknownInstruction, match=rf"^{opcode}: .* no rule for \.?{re.escape(QUALIFIERS[text])} \("):
        run(text, [np.zeros(1, np.uint32)])


@triton.jit
def stores(x):
    tl.store(x + tl.arange(0, 32), 1)


def test_clusters_of_ctas_are_refused(card):
    card(90)
    with pytest.raises(UnknownInstruction, match="stores in clusters of 2 CTAs: this card runs none"):
        stores[(1,)](torch.zeros(32), num_ctas=2)  # pyright: ignore[reportCallIssue]
    for ctas in ("2", "1, 2", "4, 1, 1"):
        with pytest.raises(UnknownInstruction, match=rf"\.reqnctapercluster {ctas}: this card runs no clusters"):
            read(module("", [], limits=f".reqnctapercluster {ctas}"))
    assert read(module("", [], limits=".reqnctapercluster 1, 1, 1")).threads == 32


def test_every_rule_has_forms_and_every_form_a_rule():
    flow = {"bra", "brx", "ret", "exit", "bar", "barrier", "setmaxnreg"}  # the scheduler's own
    assert set(forms.KNOWN) == set(RULES) | flow


def test_a_hint_changes_nothing():
    x = np.arange(32, dtype=np.uint32)
    for load in ("ld.global", "ld.global.cg", "ld.global.L1::evict_first", "ld.global.L1::evict_last.L2::cache_hint"):
        policy = ", %rd9" if "hint" in load else ""
        body = (
            f"createpolicy.fractional.L2::evict_first.b64 %rd9; {load}.b32 OUT, [%rd20]{policy}; add.s32 OUT, OUT, IN0;"
        )
        assert np.array_equal(several(body, [x], 4), 2 * x), load


def test_a_branch_table_may_name_a_label_twice():
    """As that of Triton 3.8's warps without work: lanes that choose either entry go on there, and none is lost."""
    body = """
    and.b32 %r1, %r0, 3;
    mov.b32 %r2, 7;
    table: .branchtargets here, there, here, there;
    brx.idx %r1, table;
here:
    mov.b32 %r2, 1;
there:
    mad.wide.u32 %rd20, %r0, 4, %rd0;
    st.global.b32 [%rd20], %r2;"""
    out = np.zeros(32, np.uint32)
    run(body, [out])
    assert out.tolist() == [1, 7] * 16
