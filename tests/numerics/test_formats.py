"""The five formats against torch and ml_dtypes."""

import copy
import dataclasses
import pickle

import ml_dtypes
import pytest
import torch

import fp8engine as fe
from fp8engine.errors import UnknownName
from fp8engine.numerics.formats import BY_DTYPE, FORMATS

ALL = [fe.E4M3, fe.E5M2, fe.FP16, fe.BF16, fe.FP32]
NUMPY = {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2", "FP16": "float16", "BF16": "bfloat16", "FP32": "float32"}
each = pytest.mark.parametrize("format", ALL, ids=str)


@each
def test_numbers_are_those_of_torch_and_ml_dtypes(format: fe.Format):
    theirs, torchs = ml_dtypes.finfo(NUMPY[format.name]), torch.finfo(format.dtype)
    for ours, name in [(format.max, "max"), (format.smallest_normal, "smallest_normal"), (format.eps, "eps")]:
        assert ours == float(getattr(theirs, name)) == getattr(torchs, name), name
    assert format.smallest_subnormal == float(theirs.smallest_subnormal)
    assert format.mantissa_bits == theirs.nmant
    assert format.bits == theirs.bits == torchs.bits
    assert format.is_fp8 == (format.bits == 8)
    assert format.has_inf == torch.tensor(float("inf")).to(format.dtype).float().isinf()


@each
def test_a_format_is_one_object_wherever_it_goes(format: fe.Format):
    assert pickle.loads(pickle.dumps(format)) is format
    assert copy.deepcopy({"cast": [format]})["cast"][0] is format
    assert fe.Format.named(format.name.lower()) is fe.Format.named(format.name) is format
    assert fe.Format.of(format.dtype) is format
    assert getattr(fe, repr(format)) is format


def test_formats_are_frozen_distinct_keys():
    assert len(set(ALL)) == len(FORMATS) == len(BY_DTYPE) == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        fe.E4M3.max = 240.0  # pyright: ignore[reportAttributeAccessIssue]


def test_what_is_no_format_is_refused_and_a_misspelt_name_gets_the_nearest():
    for name, nearest in {"E4M4": "E4M3", "e5m3": "E5M2", "BFP16": "BF16", " fp32": "FP32"}.items():
        why = f"unknown format '{name}'; did you mean .*'{nearest}'.* known: E4M3, E5M2, "
        with pytest.raises(UnknownName, match=why):
            fe.Format.named(name)
    for name in (None, 8, fe.E4M3):
        with pytest.raises(UnknownName, match="unknown format"):
            fe.Format.named(name)  # pyright: ignore[reportArgumentType]
    for dtype in (torch.float64, torch.int8, torch.float8_e4m3fnuz):
        with pytest.raises(UnknownName, match=str(dtype)):
            fe.Format.of(dtype)
