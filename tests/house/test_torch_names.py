"""fp8engine/_torch.py: the one file with private names of torch; each is there in this torch and does what is said."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fp8engine import _torch

ROOT = Path(__file__).parents[2]
FILES = [path for path in sorted((ROOT / "fp8engine").rglob("*.py")) if "kernels" not in path.parts]


def private_names(source: str) -> Iterator[str]:
    """Dotted names of torch with a part that begins with an underscore, imported or read as attributes."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    found = [(alias, f"{node.module}.{alias.name}") for node in imports for alias in node.names]
    modules = {alias.asname or alias.name: name for alias, name in found if name.startswith("torch.")}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute() as value):
                if ast.unparse(value).startswith("torch."):
                    modules[name] = ast.unparse(value)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                yield from (f"{module}.{a.name}" for a in names if private(f"{module}.{a.name}"))
            case ast.Import(names=names):
                yield from (a.name for a in names if a.name.startswith("torch.") and private(a.name))
            case ast.Attribute():
                first, dot, rest = ast.unparse(node).partition(".")
                name = modules.get(first, first) + dot + rest
                if name.startswith("torch.") and name.replace(".", "").replace("_", "").isalnum() and private(name):
                    yield name


def private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_of_torch_are_in_one_file(path: Path):
    if path.name != "_torch.py":
        assert list(private_names(path.read_text())) == []


def test_a_planted_private_name_is_found():
    source = "from torch._C import f\naten = torch.ops.aten\nx = torch._scaled_mm(aten._g, torch.ones(1)._version)"
    assert set(private_names(source)) == {"torch._C.f", "torch._scaled_mm", "torch.ops.aten._g"}


@pytest.mark.parametrize("name", sorted(set(private_names((ROOT / "fp8engine" / "_torch.py").read_text()))))
def test_torch_still_has(name: str):
    """Fails by the name that torch has changed, rather than somewhere inside a training."""
    found: object = torch
    for i, part in enumerate(name.split(".")[1:], 2):
        if not hasattr(found, part):
            __import__(".".join(name.split(".")[:i]))
        found = getattr(found, part)


def test_each_says_what_the_engine_asks_it():
    x = torch.ones(2, requires_grad=True)
    assert _torch.dispatch_modes() == 0
    assert _torch.dispatch_mode_stack() == _torch.function_modes() == []
    assert _torch.graph_task() == -1
    assert not _torch.transforms_active()
    assert not _torch.tracing()
    assert not _torch.autocast_active()
    seen = []
    with _torch.TorchDispatchMode(), torch.autocast("cpu"):
        assert _torch.dispatch_modes() == 1
        assert _torch.autocast_active()
        with _torch.disable_current_modes():
            assert _torch.dispatch_modes() == 0
    x.register_hook(lambda g: seen.append(_torch.graph_task()))
    before = _torch.sequence_number()
    y = x * 2
    assert _torch.sequence_number() == before + 1
    y.sum().backward()
    assert seen[0] >= 0
    torch.func.grad(lambda a: seen.append(_torch.transforms_active()) or a.sum())(torch.ones(2))
    assert seen[1]
    assert _torch.unsafe_view(torch.ones(2, 3), [6])._base is None
    assert torch.equal(_torch.foreach_norm([torch.tensor([3.0, 4.0])])[0], torch.tensor(5.0))
