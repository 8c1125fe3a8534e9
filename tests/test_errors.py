"""Every refusal is an Fp8EngineError and a builtin error, survives a process boundary, and nothing else is raised."""

import ast
import inspect
import pickle
from pathlib import Path

import pytest

import fp8engine
from fp8engine import errors

BUILTIN = {
    errors.UnknownName: ValueError,
    errors.InvalidRecipe: ValueError,
    errors.UnsupportedDtype: TypeError,
    errors.ShapeError: RuntimeError,
    errors.BackendError: RuntimeError,
    errors.ConversionError: ValueError,
    errors.StrictError: RuntimeError,
    errors.StateError: ValueError,
    errors.VersionError: RuntimeError,
    errors.ParallelError: RuntimeError,
    errors.GradientError: RuntimeError,
}
# Python's own protocols: a Mapping's missing key, an operator that declines, typer's exit code, a process's end.
PROTOCOL = {"KeyError", "AttributeError", "NotImplementedError", "StopIteration", "SystemExit", "typer.Exit"}


def test_the_list_above_is_whole():
    kinds = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__}
    assert kinds == {errors.Fp8EngineError, errors.EmulationWarning, *BUILTIN}


@pytest.mark.parametrize("kind", BUILTIN, ids=lambda kind: kind.__name__)
def test_each_is_caught_as_ours_and_as_a_builtin(kind: type[Exception]):
    error = kind("format", "E4", ["E4M3"]) if kind is errors.UnknownName else kind("why")
    for caught in (errors.Fp8EngineError, BUILTIN[kind]):
        with pytest.raises(caught) as found:
            raise error
        assert found.value is error
    assert issubclass(errors.EmulationWarning, UserWarning)
    again = pickle.loads(pickle.dumps(error))  # as a data-loader's or a pool's worker sends it
    assert type(again) is kind
    assert (str(again), again.args) == (str(error), error.args)


@pytest.mark.parametrize(
    ("name", "known", "message"),
    [
        ("curent", ["current", "delayed"], "unknown x 'curent'; did you mean 'current'? known: current, delayed"),
        ("row", ["rows", "rowx", "tensor"], "unknown x 'row'; did you mean 'rowx' or 'rows'? known: rows, rowx, tensor"),
        ("E5M3", ["e4m3", "E5M2"], "unknown x 'E5M3'; did you mean 'E5M2' or 'e4m3'? known: e4m3, E5M2"),
        ("zzz", ["current"], "unknown x 'zzz'; known: current"),
        (None, ["a"], "unknown x None; known: a"),
        ("a", [], "unknown x 'a'; known: "),
    ],
)
def test_unknown_names_offer_the_nearest(name, known, message: str):
    assert str(errors.UnknownName("x", name, iter(known))) == message


def test_a_long_list_is_cut_but_its_nearest_name_is_not():
    known = [f"blocks.{i}.up" for i in range(300)]
    message = str(errors.UnknownName("layer", "blocks.299.upp", known))
    assert "did you mean 'blocks.299.up'" in message
    assert message.endswith("blocks.19.up, … (300 in all)")


def raised(tree: ast.AST) -> set[str]:
    """What a module raises by name; a bare `raise` and `raise error` of a caught one pass on what there was."""
    found = {ast.unparse(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc}
    return {text.split("(")[0] for text in found if text.split("(")[0][:1].isupper() or "." in text.split("(")[0]}


@pytest.mark.parametrize("source", ["raise ValueError('x')", "raise torch.OutOfMemoryError"])
def test_the_check_below_finds_a_planted_raise(source: str):
    assert raised(ast.parse(source)) - PROTOCOL


def test_the_library_raises_nothing_else_and_asserts_nothing():
    root = Path(fp8engine.__file__).parent
    for path in sorted(p for p in root.rglob("*.py") if "kernels" not in p.relative_to(root).parts):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        ours = {kind.__name__ for kind in BUILTIN} | {f"errors.{kind.__name__}" for kind in BUILTIN}
        assert raised(tree) - ours - PROTOCOL == set(), path
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree)), path
