"""Keys of compiled launches: a launch whose key is the committed one has the machine code and the verdict it had.

A key is a hash of all that the two are made from: what is compiled of the kernel's module and of every module of
kernels/ that it imports, at any remove; what Triton is told (signature, constants, alignment, options, card, programs);
Triton's version, whose wheel has ptxas; the case's part in the judgement; its sources.  What is compiled: functions
under `jit` and what they name; not the launchers, whose doing is in what Triton is told, and no comment.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

import triton

from benchmarks.machine_code import judge, offline
from benchmarks.machine_code.launches import Case

PACKAGE = "fp8engine.kernels"
KERNELS = Path(__file__).parents[2] / "kernels"
JUDGEMENT = ("judge.py", "offline.py", "sass.py", "traffic.py")
INSTALLED = str(Path(triton.__file__).parent)  # options name a file of it: where it lies is no part of a key


def of(case: Case, folder: Path = KERNELS) -> dict[str, str]:
    """{name of the row: key} of every kernel that the case starts, with the kernels' sources of that folder."""
    return {name: _key(case, launch, folder) for name, launch in judge.launched(case).items()}


def _key(case: Case, launch: offline.Launch, folder: Path) -> str:
    told = launch.signature, launch.constants, launch.attributes, launch.options, launch.architecture, launch.programs
    functions = [launch.kernel, *(value for value in launch.constants.values() if hasattr(value, "__module__"))]
    modules = {f.__module__.removeprefix(f"{PACKAGE}.") for f in functions if f.__module__.startswith(f"{PACKAGE}.")}
    parts = [launch.name, repr(told).replace(INSTALLED, ""), repr((case.config, case.fp8, case.wide))]
    parts += [triton.__version__, _judgement(), *(text for name in sorted(modules) for text in _sources(name, folder))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@functools.cache
def _judgement() -> str:
    return "".join(Path(__file__).with_name(name).read_text() for name in JUDGEMENT)


@functools.cache
def _sources(name: str, folder: Path) -> list[str]:
    """What is compiled of a module of kernels/ and of all that it imports from there, by name."""
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = compiled((folder / f"{name}.py").read_text())
            waiting += imported(found[name])
    return [found[name] for name in sorted(found)]


def compiled(source: str) -> str:
    """The functions of a module under `jit`, the constants and imports that they name, without comments and docstrings.

    >>> kernel = "@triton.jit\\ndef f(x,\\n      y):\\n    return x + A  # why"
    >>> print(compiled(f"A, B = 1, 2\\nimport math\\n{kernel}\\ndef g():\\n    return math.pi"))
    A, B = (1, 2)
    @triton.jit
    def f(x, y):
        return x + A
    """
    statements = ast.parse(source).body
    kept = [node for node in statements if isinstance(node, ast.FunctionDef) and _is_compiled(node)]
    for function in kept:
        if ast.get_docstring(function) is not None:
            del function.body[0]
    while found := [node for node in statements if node not in kept and _binds(node) & _names(kept)]:
        kept += found
    for node in kept:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [alias for alias in node.names if _bound(alias) in _names(kept)]
    return "\n".join(ast.unparse(node).strip() for node in statements if node in kept)


def _is_compiled(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator).partition("(")[0] for decorator in function.decorator_list)


def _names(nodes: Iterable[ast.stmt]) -> set[str]:
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def _binds(node: ast.stmt) -> set[str]:
    """The names that an import or an assignment makes."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {_bound(alias) for alias in node.names}
    return _names([node]) if isinstance(node, (ast.Assign, ast.AnnAssign)) else set()


def _bound(alias: ast.alias) -> str:
    return (alias.asname or alias.name).partition(".")[0]


def imported(source: str) -> set[str]:
    """Modules of kernels/ that a source imports, anywhere in it.

    >>> sorted(imported("from fp8engine.kernels import tile\\ndef f():\\n    import fp8engine.kernels.launch"))
    ['launch', 'tile']
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            names |= {f"{PACKAGE}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(f"{PACKAGE}.")}
