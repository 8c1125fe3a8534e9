"""No alias of a loop-carried value in a kernel: `before = slot` ahead of a loop and again inside it.

Triton (3.6 to 3.9, CodeGenerator._find_carries) visits a loop's body once and carries each name that the visit leaves
with another SSA value than it had ahead of the loop.  An assignment of a plain name makes no value, so that

    before = slot                  before and slot: one value, v
    for ... in range(...):
        ...
        before = slot              on the visit slot is still v, and before ends as it began: it is not carried
        slot += 1                  slot is: from the second pass on `before` is what slot was ahead of the loop

The interpreter runs Python, in which nothing is wrong with it, and the compiler says nothing: the Gluon matmul
deadlocked for K > 256.  `slot + 0` is a value of its own.  A loop over static_range is unrolled and carries nothing.
"""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "kernels").glob("*.py"))


def aliases(source: str) -> list[str]:
    """ "function: name" of each name that is set to a plain name ahead of a loop and inside it."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    kernels = [node for node in functions if any("jit" in ast.unparse(mark) for mark in node.decorator_list)]
    return [f"{node.name}: {name}" for node in kernels for name in _in_block(node.body, set())]


def _in_block(block: list[ast.stmt], known: set[str]) -> Iterator[str]:
    """The faults of a block.  known: names that are aliases, ahead of the block and, when it is done, behind it."""
    for statement in block:
        if isinstance(statement, ast.FunctionDef):
            yield from _in_block(statement.body, set())
        elif isinstance(statement, ast.For | ast.While | ast.If):
            if not isinstance(statement, ast.If) and "static_range" not in ast.unparse(statement).partition("\n")[0]:
                yield from sorted({name for name, alias in _assigned(statement) if alias and name in known})
            ways = [set(known), set(known)]  # an alias on one way is one
            for branch, way in zip((statement.body, statement.orelse), ways, strict=True):
                yield from _in_block(branch, way)
            known.clear()
            known.update(*ways)
        else:
            for name, alias in _assigned(statement):
                (known.add if alias else known.discard)(name)


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, bool]]:
    """(name, whether it is set to a plain name) of every assignment in a statement, a tuple's one by one."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names, values = [target], [node.value]
                if isinstance(target, ast.Tuple):
                    names = target.elts
                    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(names)
                for name, value in zip(names, values, strict=True):
                    yield ast.unparse(name), isinstance(value, ast.Name)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):  # annotated: a constexpr, which no loop carries
            yield ast.unparse(node.target), False


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_kernel_has_an_alias_that_a_loop_should_carry(path: Path):
    assert aliases(path.read_text()) == []


PLANTED = """
    @triton.jit
    def f(slot, K, MORE: gl.constexpr):
        before = slot
        for k in range(0, K, 32):
            use(before)
            before = slot
            slot += 1
"""
LOOP = "for k in range(0, K, 32):"


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("use", "use", ["f: before"]),
        ("@triton.jit", "@gluon.jit(do_not_specialize=['K'])", ["f: before"]),
        ("before = slot\n        for", "before, other = slot, 0\n        for", ["f: before"]),
        ("before = slot\n        for", "if K > 0:\n            before = slot\n        for", ["f: before"]),
        (LOOP, "while slot < K:", ["f: before"]),
        (LOOP, f"{LOOP}\n          {LOOP}", ["f: before", "f: before"]),  # of either loop
        (LOOP, f"if K > 0:\n          {LOOP}", ["f: before"]),
        ("before = slot\n        for", "before = slot + 0\n        for", []),
        ("before = slot\n            slot", "before = slot + 0\n            slot", []),
        (LOOP, "for k in tl.static_range(0, MORE):", []),
        (LOOP, f"before = before + 1\n        {LOOP}", []),  # no longer one
        ("@triton.jit", "@functools.cache", []),  # Python's own
    ],
)
def test_a_planted_alias_is_found(old: str, new: str, found: list[str]):
    assert old in PLANTED
    assert aliases(textwrap.dedent(PLANTED.replace(old, new, 1))) == found
