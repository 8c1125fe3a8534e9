"""Kernels compiled without a card, and the whole plan without anything but the standard library, torch and Triton."""

import collections
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.card import pack, records
from benchmarks.card.plan import PLAN

ROOT = Path(__file__).parents[2]
GROUP = "gluon"  # 17 kernels: Gluon's, and Triton's matmuls
BLOCKED = """
import importlib.abc, importlib.machinery, sys
ALLOWED = sys.stdlib_module_names | {"torch", "torchgen", "functorch", "triton", "fp8engine", "benchmarks"}
# What torch itself requires.
ALLOWED |= {"typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock"}
machinery = importlib.machinery
class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        allowed = top in ALLOWED or top.startswith("_sysconfigdata")
        return machinery.PathFinder.find_spec(name, path, target) if allowed else None
    def find_distributions(self, *rest):  # how Triton finds its backends
        return machinery.PathFinder.find_distributions(*rest)
sys.meta_path[:] = [machinery.BuiltinImporter, machinery.FrozenImporter]
sys.meta_path.append(Bare())
sys.path.insert(0, ROOT)
"""
WALK = """
import json, time, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from benchmarks.card import measure, pretend, table
from benchmarks.card.plan import PLAN
from benchmarks.card.records import Sink
launched = {}
with pretend.pretending(pretend.NONE) as where:
    for group in PLAN:
        if group.compiles:
            measure.WORK[group.name](measure.Group(where, Sink(Path(FILE), group.name), time.perf_counter() + LIMIT))
table.text(Path(FILE))
import benchmarks.gpu
print("numpy" in sys.modules)
"""

SERVED = """
try: import numpy
except ModuleNotFoundError: print("numpy is blocked")
from benchmarks import generate, networks
from benchmarks.card import pretend
from fp8engine.bench.harness import Timer
from fp8engine.bench.timing import WallClock
with pretend.pretending(pretend.NONE) as where:
    ways = {name: way for name, way in generate.variants().items() if name.startswith("served")}
    case = generate.Case(networks.Size(256, 512, 4, 2, 2, 64), 1, 16, 2)
    for row in generate.compare(case, where, ways, Timer(WallClock(), 1)):
        print(row["name"], row.get("why"))
"""


def bare(code: str, **names: object) -> str:
    """What a process prints in which nothing can be imported but the standard library, torch and Triton."""
    given = "\n".join(f"{name} = {value!r}" for name, value in {"ROOT": str(ROOT), **names}.items())
    command = [sys.executable, "-c", f"{given}\n{BLOCKED}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_layers_of_served_weights_are_followed_without_a_card():
    told = bare(SERVED)
    assert all(part in told for part in ("numpy is blocked", "served current", "served blockwise"))
    assert "Error" not in told


@pytest.mark.nightly
@pytest.mark.slow
def test_a_bare_machine_walks_the_whole_plan(tmp_path: Path):
    """Every group begins everything that it has, and what cannot be followed without a card is known by name.

    A benchmark's variants are checked, and each launch reaches Triton; no kernel is compiled.
    """
    file = tmp_path / "gpu.jsonl"
    assert bare(WALK, FILE=str(file), LIMIT=1e6).splitlines()[-1] == "False"
    found, broken = records.read(file)
    assert broken == 0
    begun = collections.Counter(one["group"] for one in found if one["kind"] == "begin")
    on_card = {"checks-8"}  # graphs, streams, the profiler
    assert set(begun) | on_card == {group.name for group in PLAN if group.compiles}
    assert begun["smoke"] == 20
    assert {one["name"]: one["wrong"] for one in found if one.get("raised")} == {}
    # What is wrong is values, which are not there; a graph is the one thing that needs the card itself.
    rows = [one["row"] for one in found if one["kind"] == "row"]
    assert {row["name"]: row["why"] for row in rows if "Error" in row.get("why", "")}.keys() <= {"CUDA graph"}


def compiled(tmp_path: Path, *arguments: str) -> list[records.Record]:
    """A process that compiles the group's kernels into tmp_path/cache; its records."""
    file = tmp_path / "pack.jsonl"
    file.unlink(missing_ok=True)
    file.touch()
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--file", str(file), "--groups", GROUP, *arguments]
    command += ["--cache", str(tmp_path / "cache")]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_STORE_BINARY_ONLY": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    return [record for record in records.read(file)[0] if record["kind"] == "warm"]


@pytest.mark.nightly
@pytest.mark.slow
def test_what_one_process_compiled_another_finds_all_of(tmp_path: Path):
    shares = [compiled(tmp_path, "--warm", f"{index}/2")[0] for index in range(2)]
    made = sum(share["compiled"] for share in shares)
    assert made == len(pack.entries(tmp_path / "cache")) > 10
    assert all(share["compiled"] < made for share in shares)
    manifest = pack.write(tmp_path / "cache", tmp_path / "pack.tar.xz", {"groups": [GROUP]})
    assert manifest["kernels"] == made

    (tmp_path / "cache").rename(tmp_path / "elsewhere")  # so that nothing is found by an old path
    (tmp_path / "cache").mkdir()
    assert "why" not in pack.unpack(tmp_path / "pack.tar.xz", tmp_path / "cache")
    (again,) = compiled(tmp_path, "--warm", "0/1")
    assert {key: again[key] for key in ("pack", "cache", "compiled")} == {"pack": made, "cache": 0, "compiled": 0}


def test_a_pack_that_is_too_large_is_not_written_and_one_of_another_triton_is_refused(tmp_path: Path, monkeypatch):
    empty, file, cache = (tmp_path / name for name in ("empty", "pack.tar.xz", "cache"))
    empty.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(pack, "MOST_BYTES", 10)
        with pytest.raises(ValueError, match="GROUPS="):
            pack.write(empty, file, {})
    assert list(tmp_path.iterdir()) == [empty]
    pack.write(empty, file, {})
    for name, version in (("triton", "3.7.0"), ("ptxas", "Build cuda_13.0")):
        monkeypatch.setattr(pack, "compiler", lambda name=name, version=version: {name: version})
        assert f"made with {name} " in pack.unpack(file, cache)["why"]
    assert "make gpu-pack makes it" in pack.unpack(tmp_path / "none", cache)["why"]
    assert not cache.exists()


def test_a_pack_writes_nothing_outside_of_the_cache(tmp_path: Path):
    file = tmp_path / "pack.tar.xz"
    with tarfile.open(file, "w:xz") as tar:
        pack._add(tar, pack.MANIFEST, json.dumps(pack.compiler()).encode())
        pack._add(tar, "../../evil.json", b"{}")
    with pytest.raises(ValueError, match="outside of the cache"):
        pack.unpack(file, tmp_path / "cache")
