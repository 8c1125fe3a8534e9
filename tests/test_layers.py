"""Imports go down: a file of the library imports from strictly lower rows of HOUSE, or from its own folder.

Read with `ast`, imports inside functions included; those under `if TYPE_CHECKING:` never run, and do not count.
A file in no row fails too, so whoever adds one decides where it stands.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The rooms, bottom first (docs/architecture.md): a room imports only from rooms above it in this table.
HOUSE = (
    ("ground", "errors.py", "_torch.py", "_moved.py"),
    ("numerics", "numerics/"),
    ("kernels", "kernels/"),
    ("ops", "ops/"),
    ("scaling", "scaling/"),
    ("amp", "amp/"),
    ("autograd", "autograd/"),
    ("auto", "auto/"),
    ("nn", "nn/"),
    ("convert", "convert/"),
    ("distributed", "distributed/"),
    ("export", "export/"),
    ("report", "report/"),
    ("bench", "bench/"),
    ("demo", "demo/"),
    ("whole", "__init__.py"),
    ("cli", "cli/"),
    ("main", "__main__.py"),
)
RANK = {place: rank for rank, (_, *places) in enumerate(HOUSE) for place in places}
LAYER = {place: layer for layer, *places in HOUSE for place in places}

# Places that may import less of fp8engine than the rows below them.
ONLY = {
    "kernels/": set(),  # kernels speak torch.dtype
    "amp/": {"errors.py", "formats.py", "device.py", "names.py"},  # the FP16 baseline knows nothing of FP8
}
NOT_OURS_TO_IMPORT = {"kernels", "tests", "benchmarks", "examples"}  # top-level folders that are no packages
KERNELS_USE = {"torch", "triton", *sys.stdlib_module_names}


def test_every_import_goes_down():
    assert list(violations(ROOT)) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("recipe.py", "import fp8engine.ops", "fp8engine/recipe.py:1 (L1) imports ops.py (L2)"),
        ("ops.py", "def f():\n    from fp8engine.tensor import T", "fp8engine/ops.py:2 (L2) imports tensor.py (L3)"),
        ("ops.py", "from fp8engine import convert", "fp8engine/ops.py:1 (L2) imports convert.py (L8)"),
        ("ops.py", "from fp8engine import quantize", "fp8engine/ops.py:1 (L2) imports __init__.py (L11)"),
        ("ops.py", "from .tensor import T", "fp8engine/ops.py:1 (L2) imports tensor.py (L3)"),
        ("functional/mlp.py", "from ..modules import x", "fp8engine/functional/mlp.py:1 (L6) imports modules/ (L7)"),
        ("hf.py", "from fp8engine.report.html import page", "fp8engine/hf.py:1 (L9) imports report/ (L9)"),
        ("ops.py", "import_module('fp8engine.hf')", "fp8engine/ops.py:1 (L2) imports hf.py (L9)"),
        ("amp/scaler.py", "import fp8engine.reference", "fp8engine/amp/scaler.py:1 (L1) imports reference/ (L0)"),
        ("ops.py", "import kernels", "fp8engine/ops.py:1 imports kernels: no package of ours"),
        ("novel.py", "import torch", "fp8engine/novel.py has no layer"),
        ("../kernels/quantize.py", "import numpy", "kernels/quantize.py:1 imports numpy"),
        (
            "../kernels/quantize.py",
            "from fp8engine import formats",
            "kernels/quantize.py:1 (L0) imports formats.py (L0)",
        ),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, file: str, source: str, complaint: str):
    plant(tmp_path, file, source)
    (found,) = violations(tmp_path)
    assert found.startswith(complaint)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("ops.py", "from fp8engine import device, kernels"),
        (
            "modules/linear.py",
            "from fp8engine.functional.linear import linear\nfrom fp8engine.modules import attention",
        ),
        ("modules/linear.py", "if TYPE_CHECKING:\n    from fp8engine.convert import Plan"),
        ("__main__.py", "from fp8engine.cli import main"),
        ("../kernels/quantize.py", "import triton.language as tl\nfrom fp8engine.kernels.rounding import rne"),
    ],
)
def test_a_lawful_import_is_not(tmp_path: Path, file: str, source: str):
    plant(tmp_path, file, source)
    assert list(violations(tmp_path)) == []


def test_kernels_is_no_package_of_its_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "fp8engine" / "kernels").readlink() == Path("../kernels")


def plant(root: Path, file: str, source: str) -> None:
    """A house of one file, beside the modules that the planted sources name."""
    names = ("device", "ops", "tensor", "convert", "hf", "formats")
    for path in [*(root / "fp8engine" / f"{name}.py" for name in names), root / "kernels" / "rounding.py"]:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (root / "fp8engine" / "kernels").symlink_to("../kernels")
    path = root / "fp8engine" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)


def violations(root: Path) -> Iterator[str]:
    """One line for each import that goes up, and for each file without a row."""
    for path in library_files(root):
        shown, place = path.relative_to(root), place_of(module_of(path, root))
        if place not in RANK:
            yield f"{shown} has no layer: add {place} to HOUSE, at its place in DESIGN section 2"
            continue
        for line, name in imports(path, root):
            top = name.partition(".")[0]
            if top in NOT_OURS_TO_IMPORT:
                yield f"{shown}:{line} imports {top}: no package of ours; the kernels are fp8engine.kernels"
            elif top != "fp8engine":
                if place == "kernels/" and top not in KERNELS_USE:
                    yield f"{shown}:{line} imports {top}: kernels use torch and triton"
            elif not lawful(place, target := place_of(name)):
                layer = LAYER.get(target, "no layer")
                yield f"{shown}:{line} ({LAYER[place]}) imports {target} ({layer}), which is not below it"


def library_files(root: Path) -> list[Path]:
    """Every Python file of the library; the kernels once, where they really are."""
    ours = [path for path in (root / "fp8engine").rglob("*.py") if "kernels" not in path.relative_to(root).parts]
    return sorted([*ours, *(root / "kernels").rglob("*.py")])


def lawful(place: str, target: str) -> bool:
    """Whether a file at `place` may import from `target`."""
    if place == target:
        return place.endswith("/")
    if place in ONLY:
        return target in ONLY[place]
    return RANK.get(target, len(HOUSE)) < RANK[place]


def module_of(path: Path, root: Path) -> str:
    """The dotted name a file is imported under; a package is named by its __init__.

    >>> module_of(Path("kernels/quantize.py"), Path())
    'fp8engine.kernels.quantize'
    """
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts if parts[0] == "fp8engine" else ("fp8engine", *parts))


def place_of(module: str) -> str:
    """The entry of HOUSE that a module belongs to.

    >>> place_of("fp8engine.recipe"), place_of("fp8engine.amp.scaler"), place_of("fp8engine")
    ('recipe.py', 'amp/', '__init__.py')
    """
    parts = module.split(".")[1:] or ["__init__"]
    folders = {place[:-1] for place in RANK if place.endswith("/")}
    return f"{parts[0]}/" if parts[0] in folders or len(parts) > 1 else f"{parts[0]}.py"


def imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports, with `from package import module` told from `import name`."""
    package = module_of(path, root).split(".")[:-1]
    for node in nodes_that_run(ast.parse(path.read_text(), str(path))):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                above = package[: len(package) - level + 1] if level else []
                base = ".".join([*above, *([module] if module else [])])
                for alias in names:
                    inner = f"{base}.{alias.name}"
                    yield node.lineno, inner if base == "fp8engine" and is_module(inner, root) else base
            case ast.Call(func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=[name, *_]):
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield node.lineno, name.value


def nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, but for the bodies of `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from nodes_that_run(other)
        else:
            yield child
            yield from nodes_that_run(child)


def is_module(name: str, root: Path) -> bool:
    """Whether a dotted name is a file or a folder of the library, rather than something defined in one."""
    place = root / name.replace(".", "/")
    return place.with_suffix(".py").exists() or place.is_dir()
