"""fe.hf.export, fe.hf.load, fe.hf.Fp8EngineConfig: where they are, and what asking for them imports."""

import subprocess
import sys

import pytest

import fp8engine as fe
from fp8engine.export import iterate, quantizer, read, write


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_they_are_the_packages_own():
    assert (fe.hf.export, fe.hf.load, fe.hf.ExportReport) == (write.export, read.load, write.ExportReport)
    assert fe.hf.Fp8EngineConfig is quantizer.Fp8EngineConfig
    assert fe.hf.iter_fp8 is iterate.iter_fp8
    assert {"export", "iter_fp8", "load", "Fp8EngineConfig", "describe"} <= set(fe.hf.__all__)
    assert all(getattr(fe.hf, name) for name in fe.hf.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Fp9EngineConfig'"):
        fe.hf.Fp9EngineConfig  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_only_the_config_imports_transformers():
    code = (
        "import sys, fp8engine as fe; fe.hf.export; fe.hf.load; print('transformers' in sys.modules)\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as known; print('fp8engine' in known)\n"
        "fe.hf.Fp8EngineConfig; print('fp8engine' in known)\n"
    )
    assert python(code).split() == ["False", "False", "True"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Fp8EngineConfig", "Fp8Cache"])
def test_without_transformers_it_says_what_to_install(name: str):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import fp8engine as fe\n"
        f"try: fe.hf.{name}\n"
        "except fe.errors.ConversionError as error: print(error)\n"
    )
    assert python(code) == f"{name} needs transformers: pip install 'fp8engine[hf]'"
