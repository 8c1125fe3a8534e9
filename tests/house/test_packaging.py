"""What a user installs is what the tree holds; importing it loads nothing optional and changes nothing.

Importing is watched in a fresh interpreter, in a bare copy of the tree: the library, not this test's process.
"""

import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONAL = ("triton", "transformers", "peft", "matplotlib", "tensorboard", "torchao", "sklearn", "fp8engine.kernels")

# The state of a process that a library could change by being imported; printed before and after.
SNAPSHOT = """
import os, random, signal, sys, warnings
import torch

def ours(loadable):  # torch.load may make our own values, and nothing else that it could not make before
    value, name = loadable if isinstance(loadable, tuple) else (loadable, "fp8engine.")  # or under an old name of ours
    return getattr(value, "__module__", "").startswith("fp8engine.") and name.startswith("fp8engine.")

def snapshot():
    cpu, rng = torch.backends.cpu.get_cpu_capability(), torch.random.get_rng_state().tolist()
    return dict(
        dtype=torch.get_default_dtype(), device=torch.get_default_device(), cpu=cpu, rng=rng, random=random.getstate(),
        threads=(torch.get_num_threads(), torch.get_num_interop_threads()), grad=torch.is_grad_enabled(),
        deterministic=(torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
        matmul=(torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
        cuda=torch.cuda.is_initialized(), environment=dict(os.environ), filters=list(warnings.filters),
        hooks=(sys.excepthook, sys.displayhook, signal.getsignal(signal.SIGINT), len(sys.meta_path)),
        linear=(torch.nn.Linear.forward, torch.nn.functional.linear, torch.Tensor.__matmul__, torch.matmul),
        loading=(torch.load, torch.save), loadable={c for c in torch.serialization.get_safe_globals() if not ours(c)},
        path=list(sys.path), cwd=os.listdir(),
    )
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree as a clone would have it once today's files are committed: links kept, ignored files left."""
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    copy = tmp_path_factory.mktemp("tree")
    for name in filter(None, names):
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.exists():
            target.write_bytes(source.read_bytes())
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel built from that copy, without the network."""
    out = tmp_path_factory.mktemp("wheel")
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", out, tree], check=True)
    (path,) = out.glob("fp8engine-*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_the_wheel_holds_the_library_and_nothing_else(wheel: zipfile.ZipFile, tree: Path):
    sources = {
        re.sub(r"^kernels/", "fp8engine/kernels/", str(path.relative_to(tree)))
        for folder in ("fp8engine", "kernels")
        for path in (tree / folder).rglob("*")
        if path.suffix in (".py", ".md", ".typed", ".json", ".css", ".html", ".js", ".svg")
    }
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == sources
    assert {"fp8engine/kernels/README.md", "fp8engine/kernels/tuning.json"} <= set(held)


@pytest.mark.slow
def test_the_wheel_says_what_it_needs_in_words_that_read_outside_of_the_repository(wheel: zipfile.ZipFile):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata, _, description = wheel.read(name).decode().partition("\n\n")
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, flags=re.MULTILINE)
    assert sorted(needed) == ["numpy", "rich", "safetensors", "torch", "typer"]
    (triton,) = set(re.findall(r'^Requires-Dist: (triton.*extra == "triton")$', metadata, flags=re.MULTILINE))
    assert triton.startswith("triton<3.10,>=3.6;")
    assert "linux" in triton
    assert "License-Expression: Apache-2.0" in metadata
    assert "Description-Content-Type: text/markdown" in metadata
    assert "fe.convert" in description
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", description, flags=re.DOTALL))
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


def test_links_and_pictures_of_the_readme_are_made_absolute():
    text = "![a loss](docs/a.png) [words `x`](docs/b.md#part) [up](#top) [other](https://x.org)\n```\n[i](j)\n```\n"
    outside = runpy.run_path(str(ROOT / "setup.py"))["outside"]
    assert outside(text, "https://host/me/it") == (
        "![a loss](https://host/me/it/raw/HEAD/docs/a.png) [words `x`](https://host/me/it/blob/HEAD/docs/b.md#part) "
        "[up](#top) [other](https://x.org)\n```\n[i](j)\n```\n"
    )
    assert outside(text, None) == " words `x` [up](#top) [other](https://x.org)\n```\n[i](j)\n```\n"


def test_no_sdist_is_built(tree: Path, tmp_path: Path):
    """It would hold neither tests, docs and constraints nor a link from fp8engine/kernels to kernels/."""
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode != 0
    assert "fp8engine builds no sdist" in done.stderr
    assert "pip wheel ." in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_constraints_pin_everything_the_project_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    named = {match[0] for need in wanted if (match := re.match(r"[\w-]+", need))} - {project["name"]}
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    assert pinned == named


def test_the_oldest_torch_is_the_one_that_is_tested_before_a_release():
    newest, oldest = (
        dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / name).read_text(), flags=re.MULTILINE))
        for name in ("constraints.txt", "constraints-oldest.txt")
    )
    assert f'"torch>={oldest["torch"].removesuffix(".0")}"' in (ROOT / "pyproject.toml").read_text()
    # setuptools: torch 2.11's bound; numpy: Triton 3.6's interpreter takes none from 2.4 on
    differs = {name for name in oldest if oldest[name] != newest[name]}
    assert differs == {"torch", "setuptools", "triton", "numpy"}
    assert oldest.keys() == newest.keys()


# What a fresh interpreter runs, and that nothing is wrong then.
IMPORTING = {
    # Registering operators with torch.library is the one thing it may do, and the snapshot does not see it.
    "changes nothing": SNAPSHOT
    + """
before = snapshot()
import fp8engine
after = snapshot()
changed = [name for name in before if before[name] != after[name]]
assert not changed, {name: (before[name], after[name]) for name in changed}
""",
    "loads nothing optional": f"""
import sys, torch
before = set(sys.modules)  # torch may bring some itself
import fp8engine
loaded = set({OPTIONAL}) & (set(sys.modules) - before)
assert not loaded, loaded
""",
    # Without an install; and `import kernels`, started from the root, is no package of ours.
    "finds its own kernels": """
import os, fp8engine, fp8engine.kernels
assert os.path.samefile(fp8engine.__path__[0], "fp8engine"), fp8engine.__path__
assert os.path.samefile(fp8engine.kernels.__path__[0], "kernels"), fp8engine.kernels.__path__
import importlib.util
spec = importlib.util.find_spec("kernels")  # a folder without __init__ gives way to an installed package
assert spec is None or spec.origin is None or not os.path.samefile(os.path.dirname(spec.origin), "kernels"), spec
""",
}


@pytest.mark.parametrize("what", IMPORTING)
def test_importing_a_bare_copy(what: str, tree: Path):
    """At the root of the copy, which alone is on the interpreter's path."""
    environment = {"PATH": "", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", IMPORTING[what]]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_console_script_is_the_package_main():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (script,) = [entry for entry in entry_points(group="console_scripts") if entry.name in scripts]
    assert script.value == scripts[script.name]
    assert callable(script.load())


def git(*arguments: str) -> str:
    """What a git command prints, in this repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout
