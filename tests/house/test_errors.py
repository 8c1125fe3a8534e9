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
    errors.ScriptError: RuntimeError,
    errors.OpListError: ValueError,
    errors.OptimizerError: RuntimeError,
    errors.LossScaleError: ValueError,
    errors.ReportError: ValueError,
}
WARNINGS = {
    errors.AttentionWarning,
    errors.BudgetWarning,
    errors.EmulationWarning,
    errors.FusionWarning,
    errors.BypassWarning,
    errors.FrozenWarning,
    errors.ParallelWarning,
    errors.ReportWarning,
    errors.ResumeWarning,
    errors.SamplingWarning,
}
# Python's own protocols: a Mapping's missing key, an attribute that is not there.
PROTOCOL = {"KeyError", "AttributeError"}


def test_the_list_above_is_whole():
    kinds = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__}
    assert kinds == {errors.Fp8EngineError, *WARNINGS, *BUILTIN}


@pytest.mark.parametrize("kind", BUILTIN, ids=lambda kind: kind.__name__)
def test_each_is_caught_as_ours_and_as_a_builtin(kind: type[Exception]):
    error = kind("format", "E4", ["E4M3"]) if kind is errors.UnknownName else kind("why")
    for caught in (errors.Fp8EngineError, BUILTIN[kind]):
        with pytest.raises(caught) as found:
            raise error
        assert found.value is error
    assert issubclass(errors.EmulationWarning, UserWarning)
    assert issubclass(errors.FusionWarning, UserWarning)
    again = pickle.loads(pickle.dumps(error))  # as a data-loader's or a pool's worker sends it
    assert type(again) is kind
    assert (str(again), again.args) == (str(error), error.args)


@pytest.mark.parametrize(
    ("name", "known", "message"),
    [
        ("curent", ["current", "delayed"], "unknown x 'curent'; did you mean 'current'? known: current, delayed"),
        ("row", ["rows", "rowx"], "unknown x 'row'; did you mean 'rowx' or 'rows'? known: rows, rowx"),
        ("E5M3", ["e4m3", "E5M2"], "unknown x 'E5M3'; did you mean 'E5M2' or 'e4m3'? known: e4m3, E5M2"),
        ("zzz", ["current"], "unknown x 'zzz'; known: current"),
        (None, ["a"], "unknown x None; known: a"),
        ("a", [], "unknown x 'a'; known: "),
    ],
)
def test_unknown_names_offer_the_nearest(name, known, message: str):
    assert str(errors.UnknownName("x", name, iter(known))) == message


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("layers.17.mlp.dwn_proj", ["layers.17.mlp.down_proj", "layers.0.mlp.down_proj", "layers.17.mlp.up_proj"]),
        ("*.q_prj", ["layers.0.self_attn.q_proj", "layers.0.mlp.up_proj", "layers.0.mlp.down_proj"]),
        ("lmhead", ["lm_head", "layers.0.mlp.down_proj", "layers.0.mlp.up_proj"]),
    ],
)
def test_of_a_long_list_only_the_nearest_three_are_named(name: str, nearest: list[str]):
    parts = "self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"
    known = [f"layers.{i}.{part}" for i in range(30) for part in parts] + ["lm_head"]
    first, second, third = map(repr, nearest)
    told = f"unknown layer {name!r}; did you mean {first}, {second} or {third}? 91 are known"
    assert str(errors.UnknownName("layer", name, known)) == told


def raised(tree: ast.AST) -> set[str]:
    """The names a module lets out: not `raise` and `raise error` of a caught one, nor what its own `except` takes."""
    kept = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.Try)
        for node in (node for line in block.body for node in ast.walk(line))
        if isinstance(node, ast.Raise) and node.exc
        if any(h.type and name(node) in ast.unparse(h.type).strip("()").split(", ") for h in block.handlers)
    }
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc and node not in kept]
    return {name(node) for node in found if name(node)[:1].isupper() or "." in name(node)}


def name(node: ast.Raise) -> str:
    """ValueError, of `raise ValueError(...)`."""
    return ast.unparse(node.exc).split("(")[0] if node.exc else ""


@pytest.mark.parametrize("source", ["raise ValueError('x')", "raise torch.OutOfMemoryError"])
def test_the_check_below_finds_a_planted_raise(source: str):
    assert raised(ast.parse(source)) - PROTOCOL
    assert raised(ast.parse(f"try: {source}\nexcept (KeyError, OSError): pass")) - PROTOCOL
    assert not raised(ast.parse(f"try: {source}\nexcept (ValueError, torch.OutOfMemoryError): pass"))


def test_the_library_raises_nothing_else_and_asserts_nothing():
    """The demo and the command line are programs upon the library: they may have an error of their own."""
    root = Path(fp8engine.__file__).parent
    ours = {name for kind in BUILTIN for name in (kind.__name__, f"errors.{kind.__name__}")}
    for path in sorted(root.rglob("*.py")):
        part, tree = path.relative_to(root).parts[0], ast.parse(path.read_text(encoding="utf-8"))
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree)), path
        assert part in ("demo", "kernels", "cli") or raised(tree) - ours - PROTOCOL == set(), path
