"""Public names: those of fp8engine itself, and every dotted path that 0.1 named, which still works for one release."""

import importlib
import subprocess
import sys
import warnings

import pytest

import fp8engine as fe
from fp8engine import _moved

NAMES = set(
    """
    Attention BF16 Cast E4M3 E5M2 FP16 FP32 Float8Tensor Format GroupedLinear Heads LayerNormLinear LayerNormMLP Linear
    PerBlock PerRow PerTensor Recipe Report TransformerLayer amp auto backend blockwise clamp convert current delayed
    distributed errors flow fuse_wgrad_accumulation hf high_precision inspect load_scaling_state_dict matmul onnx
    quantize revert rowwise rowwise_gw_hp scaling_state scaling_state_dict smooth weights_changed
    """.split()  # noqa: SIM905
)

# Paths that README, docs/, the changelog or an example of 0.1 named, and where they are today.
NAMED = {
    "fp8engine.errors.Fp8EngineError": "fp8engine.errors",
    "fp8engine.functional.attention.Cache": "fp8engine.autograd.attention",
    "fp8engine.hf.FAMILIES": "fp8engine.nn.families",
    "fp8engine.hf.Fp8EngineConfig": "fp8engine.export.quantizer",
    "fp8engine.report.tensorboard.Writer": "fp8engine.report.tensorboard",
    "fp8engine.report.trainer.ScalingStateCallback": "fp8engine.report.trainer",
}
UNCHANGED = ("fp8engine.errors", "fp8engine.report", "fp8engine.hf", "fp8engine.flow")


def test_no_public_name_is_lost_or_new():
    assert sorted(fe.__all__) == sorted(NAMES)
    assert [name for name in NAMES if not hasattr(fe, name)] == []


@pytest.mark.parametrize("path", NAMED)
def test_a_path_that_a_page_named_still_works(path: str):
    module, _, name = path.rpartition(".")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(NAMED[path]), name)
    assert [str(w.message) for w in caught if "has moved" in str(w.message)] == (
        []
        if module.startswith(UNCHANGED)
        else [f"{module} has moved to {NAMED[path]}; the old path goes with release 0.3"]
    )


@pytest.mark.parametrize(("old", "new"), _moved.moved().items())
def test_an_old_path_is_the_module_it_became(old: str, new: str):
    today = importlib.import_module(f"fp8engine.{new}")
    assert importlib.import_module(f"fp8engine.{old}")._new == today.__name__
    names = [
        name
        for name, value in vars(today).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == today.__name__
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name in names[:3]:
            assert getattr(sys.modules[f"fp8engine.{old}"], name) is getattr(today, name)


def test_a_name_that_is_nowhere_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"fp8engine\.numerics\.recipe.*nonesuch"):
        importlib.import_module("fp8engine.recipe").nonesuch  # noqa: B018


def test_old_paths_in_a_process_that_has_imported_nothing():
    """As pickle imports them: the old path first, fp8engine itself by the way."""
    code = "import fp8engine.modules.linear as m; from fp8engine.recipe import Recipe; print(m.Linear, Recipe)"
    run = [sys.executable, "-W", "ignore", "-c", code]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert out == "<class 'fp8engine.nn.linear.Linear'> <class 'fp8engine.numerics.recipe.Recipe'>\n"
