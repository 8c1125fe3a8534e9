"""Small pieces: a file holds one idea in at most 400 lines, a function takes at most six parameters."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 400
MOST_PARAMETERS = 6
FOLDERS = ("fp8engine", "kernels", "tests", "benchmarks", "examples")

# "file::Class.function": why it may take more.  An entry that is no longer needed fails.
FUSED = "nn.Linear's own, and what its norm, its activation and its memory are"
MORE_PARAMETERS = {
    "fp8engine/convert/swap.py::convert": "the public call: a model, a recipe, and one keyword for each decision",
    "fp8engine/distributed/planner.py::plan": "the public call: a model, ranks, tokens, a recipe, and an option each",
    "fp8engine/nn/layernorm_linear.py::LayerNormLinear.__init__": FUSED,
    "fp8engine/nn/layernorm_mlp.py::LayerNormMLP.__init__": FUSED,
    "fp8engine/nn/transformer.py::TransformerLayer.__init__": FUSED,
    "fp8engine/amp/decorate.py::decorate": "a script's one line, as paddle.amp.decorate: each names one decision",
    "fp8engine/amp/scaler.py::GradScaler.__init__": "torch.amp.GradScaler's own six, and two beside them",
}


def test_no_file_is_over_400_lines():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in python_files(*FOLDERS)}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_no_function_takes_more_than_six_parameters():
    crowded = set()
    for path in python_files("fp8engine"):
        for name, count in parameters(path.read_text()):
            if count > MOST_PARAMETERS:
                crowded.add(f"{path.relative_to(ROOT)}::{name}")
    assert crowded == set(MORE_PARAMETERS)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(a, b, /, c=1, *rest, d, **more): ...", [("f", 6)]),
        ("class C:\n def f(self, a): ...\n @classmethod\n def g(cls): ...", [("C.f", 1), ("C.g", 0)]),
        ("class F(Function):\n @staticmethod\n def forward(ctx, x): ...", [("F.forward", 1)]),
        ("async def f(self): ...", [("f", 1)]),
        ("def f(a):\n def g(b, c): ...", [("f", 1), ("f.g", 2)]),
        ("@command('train')\ndef train(a, b, c, d, e, f, g): ...", []),
    ],
)
def test_what_counts_as_a_parameter(source: str, found: list[tuple[str, int]]):
    assert list(parameters(source)) == found


def python_files(*folders: str) -> Iterator[Path]:
    """The Python files of some top-level folders; kernels/ is reached by its own name, not through the link."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.relative_to(ROOT).parts[:2] != ("fp8engine", "kernels"):
                yield path


def parameters(source: str) -> Iterator[tuple[str, int]]:
    """(qualified name, parameters) of every function, less the self, cls or ctx that the caller does not write.

    A command of the command line is left out: its parameters are the options, unpacked into a value at once.
    """
    yield from _parameters(ast.parse(source), "", in_class=False)


def _parameters(node: ast.AST, prefix: str, in_class: bool) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                arguments = child.args
                named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                count = len(named) + (arguments.vararg is not None) + (arguments.kwarg is not None)
                if in_class and named and named[0].arg in ("self", "cls", "ctx"):
                    count -= 1
                if not any(ast.unparse(decorator).startswith("command(") for decorator in child.decorator_list):
                    yield prefix + child.name, count
                yield from _parameters(child, f"{prefix}{child.name}.", in_class=False)
            case ast.ClassDef():
                yield from _parameters(child, f"{prefix}{child.name}.", in_class=True)
            case _:
                yield from _parameters(child, prefix, in_class)
