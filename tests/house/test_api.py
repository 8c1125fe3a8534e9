"""The API reference has every public name, and is what the docstrings say now."""

import types

import pytest

import fp8engine as fe
from benchmarks.api import PAGE, members, page, signature

MODULES = sorted(name for name in fe.__all__ if isinstance(getattr(fe, name), types.ModuleType))


def test_the_page_is_written_from_the_docstrings_of_today():
    assert PAGE.read_text() == page(), "python benchmarks/api.py --write"


def test_every_public_name_has_a_heading_and_says_what_it_is():
    text = PAGE.read_text()
    for name in fe.__all__:
        assert f" fe.{name}\n" in text, name
    for name in MODULES:
        for own, thing in members(getattr(fe, name)):
            assert f"### fe.{name}.{own}\n" in text, own
            assert thing.__doc__, own


@pytest.mark.parametrize("name", ["convert", "quantize", "keep_budget", "Linear"])
def test_a_signature_has_every_argument_and_default(name: str):
    import inspect

    found = signature(getattr(fe, name))
    for argument, each in inspect.signature(getattr(fe, name)).parameters.items():
        assert argument in found
        if each.default not in (inspect.Parameter.empty, None):
            assert f"= {each.default!r}" in found
    assert "torch." not in found
