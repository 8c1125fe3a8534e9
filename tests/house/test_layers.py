"""Imports go down: from rooms above one's own in the table of rooms, or from one's own room without a cycle.

Read with `ast`: imports inside functions count, and those of types under `if TYPE_CHECKING:`.
A file in no room fails too, so that whoever adds one decides where it stands.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The rooms, bottom first: a room may import from every room above it in this list.
ROOMS = (
    "errors",
    "_torch",
    "_numpy",
    "files",
    "environment",
    "numerics",
    "kernels",
    "ops",
    "scaling",
    "amp",
    "autograd",
    "auto",
    "nn",
    "report.flow",  # an instrument of its own, which convert reads, too
    "convert",
    "distributed",
    "export",
    "report",
    "integrations",
    "bench",
    "demo",
    "__init__",
    "cli",
    "__main__",
)
TOP = ("errors", "_torch", "_numpy", "files", "environment")  # single files
RANK = {room: rank for rank, room in enumerate(ROOMS)}
TOP_LEVEL = {room for room in ROOMS if "." not in room}
# Rooms that may import less of fp8engine than those above them: rooms, or single modules of one.
ONLY = {
    "kernels": set(),  # kernels speak torch.dtype
    "amp": {"errors", "_torch", "files", "numerics.formats"},  # the FP16 baseline knows nothing of FP8
}
NOT_OURS_TO_IMPORT = {"kernels", "tests", "benchmarks", "examples"}  # top-level folders that are no packages
KERNELS_USE = {"torch", "triton", *sys.stdlib_module_names}


def test_every_import_goes_down():
    assert list(violations(ROOT)) == []


def test_one_file_reads_the_environment():
    files = [path for path in library_files(ROOT) if reads_environment(path.read_text())]
    assert [path.name for path in files] == ["environment.py"]


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("import os\nos.environ['A']", True),
        ("from os import environ", True),
        ("import os as o\no.getenv('A')", True),
        ("from os import getenv as g", True),
        ("import os\nos.fspath('a')\nnames = 'os.environ'", False),
        ("def validate_environment(): ...", False),
    ],
)
def test_what_reads_the_environment(source: str, reads: bool):
    assert reads_environment(source) == reads


def test_no_room_has_a_cycle():
    assert cycle(ROOT) is None


def test_nothing_else_is_at_the_top_level():
    assert {path.stem for path in (ROOT / "fp8engine").iterdir() if path.name != "__pycache__"} - {"py"} == TOP_LEVEL


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("numerics/recipe.py", "import fp8engine.ops", "fp8engine/numerics/recipe.py:1 imports ops: not above"),
        ("ops/a.py", "def f():\n    from fp8engine.scaling.b import T", "fp8engine/ops/a.py:2 imports scaling: not"),
        ("ops/a.py", "from fp8engine import convert", "fp8engine/ops/a.py:1 imports convert: not above"),
        ("ops/a.py", "from fp8engine import quantize", "fp8engine/ops/a.py:1 imports __init__: not above"),
        ("ops/a.py", "from ..scaling import T", "fp8engine/ops/a.py:1 imports scaling: not above"),
        ("nn/a.py", "from fp8engine.report.html import page", "fp8engine/nn/a.py:1 imports report: not above"),
        ("ops/a.py", "import_module('fp8engine.nn')", "fp8engine/ops/a.py:1 imports nn: not above"),
        ("nn/a.py", "if TYPE_CHECKING:\n    from fp8engine.convert import Plan", "fp8engine/nn/a.py:2 imports convert"),
        ("amp/scaler.py", "import fp8engine.ops", "fp8engine/amp/scaler.py:1 imports ops: not above"),
        ("amp/scaler.py", "import fp8engine.numerics.recipe", "fp8engine/amp/scaler.py:1 imports numerics"),
        ("ops/a.py", "import kernels", "fp8engine/ops/a.py:1 imports kernels: no package of ours"),
        ("report/flow/a.py", "import fp8engine.report.b", "fp8engine/report/flow/a.py:1 imports report: not above"),
        ("convert/a.py", "import fp8engine.report.b", "fp8engine/convert/a.py:1 imports report: not above"),
        ("novel.py", "import torch", "fp8engine/novel.py is in no room"),
        ("../kernels/quantize.py", "import numpy", "kernels/quantize.py:1 imports numpy"),
        ("../kernels/quantize.py", "from fp8engine import numerics", "kernels/quantize.py:1 imports numerics: not"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, file: str, source: str, complaint: str):
    plant(tmp_path, {file: source})
    (found,) = violations(tmp_path)
    assert found.startswith(complaint)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("ops/a.py", "from fp8engine import numerics, kernels"),
        ("nn/a.py", "from fp8engine.autograd.linear import linear\nfrom fp8engine.nn import attention"),
        ("convert/a.py", "from fp8engine.report import flow"),
        ("__main__.py", "from fp8engine.cli import main"),
        ("../kernels/quantize.py", "import triton.language as tl\nfrom fp8engine.kernels.rounding import rne"),
    ],
)
def test_a_lawful_import_is_not(tmp_path: Path, file: str, source: str):
    plant(tmp_path, {file: source})
    assert list(violations(tmp_path)) == []


@pytest.mark.parametrize("block", ["def f():", "if TYPE_CHECKING:"])
def test_a_planted_cycle_is_found(tmp_path: Path, block: str):
    one, other = "from fp8engine.ops import b", f"{block}\n    from fp8engine.ops.a import g"
    plant(tmp_path, {"ops/a.py": one, "ops/b.py": "import torch"})
    assert cycle(tmp_path) is None
    plant(tmp_path, {"ops/b.py": other})
    assert cycle(tmp_path) == ["fp8engine.ops.a", "fp8engine.ops.b"]


def test_kernels_is_no_package_of_its_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "fp8engine" / "kernels").readlink() == Path("../kernels")


def plant(root: Path, sources: dict[str, str]) -> None:
    """A house with empty rooms and the files named, relative to fp8engine/."""
    (root / "kernels").mkdir(exist_ok=True)
    for room in TOP_LEVEL - {*TOP, "__init__", "__main__", "kernels"}:
        (root / "fp8engine" / room).mkdir(parents=True, exist_ok=True)
    (root / "fp8engine" / "report" / "flow").mkdir(exist_ok=True)
    if not (link := root / "fp8engine" / "kernels").is_symlink():
        link.symlink_to("../kernels")
    for file, source in sources.items():
        (root / "fp8engine" / file).write_text(source)


def violations(root: Path) -> Iterator[str]:
    """One line for each import that goes up, and for each file in no room."""
    for path in library_files(root):
        shown, room = path.relative_to(root), room_of(module_of(path, root))
        if room not in RANK:
            yield f"{shown} is in no room: add {room} to ROOMS, at its place in docs/architecture.md"
            continue
        for line, name in imports(path, root):
            top = name.partition(".")[0]
            if top in NOT_OURS_TO_IMPORT:
                yield f"{shown}:{line} imports {top}: no package of ours; the kernels are fp8engine.kernels"
            elif top != "fp8engine":
                if room == "kernels" and top not in KERNELS_USE:
                    yield f"{shown}:{line} imports {top}: kernels use torch and triton"
            elif not lawful(room, name):
                target = room_of(name)
                yield f"{shown}:{line} imports {target}: not above {room} in ROOMS"


def cycle(root: Path) -> list[str] | None:
    """The modules of one cycle of imports, sorted; None where there is none."""
    known = {module_of(path, root).removesuffix(".__init__"): path for path in library_files(root)}
    graph = {}
    for module, path in known.items():
        graph[module] = {name for _, name in imports(path, root) if name in known and name != module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return sorted(set(error.args[1]))
    return None


def library_files(root: Path) -> list[Path]:
    """Every Python file of the library; the kernels once, where they really are."""
    ours = [path for path in (root / "fp8engine").rglob("*.py") if "kernels" not in path.relative_to(root).parts]
    return sorted([*ours, *(root / "kernels").rglob("*.py")])


def reads_environment(source: str) -> bool:
    """Whether a file names `environ` or `getenv` of os, under whatever name it has imported them."""
    for node in ast.walk(ast.parse(source)):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [alias.name for alias in node.names]
        if {"environ", "environb", "getenv", "getenvb"} & set(names):
            return True
    return False


def lawful(room: str, name: str) -> bool:
    """Whether a file in `room` may import the module of that dotted name."""
    target = room_of(name)
    if room == target:
        return True
    if room in ONLY:
        return target in ONLY[room] or name.removeprefix("fp8engine.") in ONLY[room]
    return RANK.get(target, len(ROOMS)) < RANK[room]


def module_of(path: Path, root: Path) -> str:
    """The dotted name a file is imported under; a package is named by its __init__.

    >>> module_of(Path("kernels/quantize.py"), Path())
    'fp8engine.kernels.quantize'
    """
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts if parts[0] == "fp8engine" else ("fp8engine", *parts))


def room_of(module: str) -> str:
    """The room that a module is in; a folder of a room that is named in ROOMS is a room, too.

    >>> room_of("fp8engine.errors"), room_of("fp8engine.amp.scaler"), room_of("fp8engine")
    ('errors', 'amp', '__init__')
    >>> room_of("fp8engine.report.flow.fold"), room_of("fp8engine.report.folded")
    ('report.flow', 'report')
    """
    parts = module.split(".")[1:] or ["__init__"]
    inner = ".".join(parts[:2])
    return inner if inner in RANK else parts[0]


def imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports; `from package import module` names the module."""
    package = module_of(path, root).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package[: len(package) - level + 1] if level else []
                base = ".".join([*above, *([module] if module else [])])
                for alias in names:
                    inner = f"{base}.{alias.name}"
                    yield node.lineno, inner if is_module(inner, root) else base
            case ast.Call(func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=[name, *_]):
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield node.lineno, name.value


def is_module(name: str, root: Path) -> bool:
    """Whether a dotted name is a file or a folder of the library, rather than something defined in one."""
    place = root / name.replace(".", "/")
    return name.startswith("fp8engine") and (place.with_suffix(".py").exists() or place.is_dir())
