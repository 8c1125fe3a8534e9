"""Copies of a kernel's file in which one text is another, for bugs that tests plant."""

import importlib.util
from pathlib import Path
from types import ModuleType

KERNELS = Path(__file__).parents[2] / "kernels"


def edited_kernel(folder: Path, name: str, old: str, new: str) -> ModuleType:
    """A copy of kernels/<name>.py with `new` for `old`, which occurs once, imported."""
    text = (KERNELS / f"{name}.py").read_text()
    assert text.count(old) == 1, old
    path = folder / f"{name}_with_a_bug.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
