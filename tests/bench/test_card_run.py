"""`make gpu` on a fake card under a fake clock: the plan is walked to its end whatever a group does, and nothing that
was measured is lost."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.card import measure, plan, preflight, records, run, table
from benchmarks.card.plan import NAMES, PLAN, Group
from benchmarks.card.records import Sink
from fp8engine import environment as settings

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
ROW = {"name": "triton fp8 tensor fast", "shape": [8192, 8192, 8192], "correct": True, "seconds": 1e-3, "spread": 0.01}


class FakeGroup:
    """A group on the fake card: it takes some seconds, writes something, and ends in its own way.

    now: the time of the fake clock, in a list.
    """

    def __init__(self, now: list[float], sink: Sink, seconds: float, status: int | None, printed: str = ""):
        self.now, self.end, self.status, self.printed = now, now[0] + seconds, status, printed
        self.killed = False
        sink.begin("fake 1")
        sink.write("check", name="fake 1", wrong=None, seconds=0.1)
        sink.begin("fake 2")

    def poll(self) -> int | None:
        return self.status if self.now[0] >= self.end else None

    def kill(self) -> None:
        self.killed = True

    def lines(self) -> list[str]:
        return self.printed.splitlines()


def world(start: Callable, shown: list[str], now: list[float]) -> run.World:
    """Where nothing but the fake clock moves.  start: a group and its seconds -> its process."""
    return run.World(lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + seconds), start, shown.append)


# How a group ends -> (its seconds, exit status or None for never, what it prints, what the table has to say).
ENDINGS: dict[str, tuple[float, int | None, str, str]] = {
    "well": (5.0, 0, "", "done, 5 s"),
    "hang": (1e9, None, "waiting for slot 3", "killed: it was not done after"),
    "signal": (2.0, -11, "Fatal Python error", "ended by signal 11 (SIGSEGV)"),
    "exception": (2.0, 1, "Traceback\nRuntimeError: CUDA error: misaligned address", "exit status 1"),
    "out of memory": (2.0, -9, "Killed", "ended by signal 9 (SIGKILL)"),
    "garbage": (2.0, 3, "\x00\x1b[2J\xff", "exit status 3"),
}


def fake_world(file: Path, ends: Callable[[Group], str], shown: list[str]) -> run.World:
    now = [1000.0]

    def start(group: Group, seconds: float) -> FakeGroup:
        took, status, printed, _ = ENDINGS[ends(group)]
        return FakeGroup(now, Sink(file, group.name), took, status, printed)

    return world(start, shown, now)


def writing(file: Path, group: str, record: str) -> str:
    """A program that writes a record."""
    return (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\n"
        f"from benchmarks.card.records import Sink\nSink(Path({str(file)!r}), {group!r}).write({record})"
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gpu.jsonl"


BAD = [name for name in ENDINGS if name != "well"]
CASES = [*((name, BAD[place % len(BAD)]) for place, name in enumerate(NAMES)), *(("gemm", bad) for bad in BAD)]


@pytest.mark.parametrize(("group", "bad"), dict.fromkeys(CASES))
def test_a_group_that_fails_costs_itself_alone(file: Path, group: str, bad: str):
    shown: list[str] = []
    assert run.run(PLAN, file, 3600, fake_world(file, lambda it: bad if it.name == group else "well", shown)) == 1
    text, (_, _, printed, told) = table.text(file), ENDINGS[bad]
    assert shown[-1] == text
    others = [f"{other:10s} done, 5 s" for other in NAMES if other != group]
    lines = [f"    | {line}" for line in printed.splitlines()]
    for part in (told, f"FAILED {group}: ", "it was at: fake 2", *lines, *others):
        assert part in text


@pytest.mark.parametrize(("ends", "wrong"), [("well", None), ("well", "3 differ"), ("hang", None), ("signal", None)])
def test_where_gluon_goes_wrong_the_other_groups_run_without_it(file: Path, ends: str, wrong: str | None):
    environment: dict[str, str] = {}
    if wrong:
        Sink(file, "gluon").write("check", name="matmul_gluon", wrong=wrong)
    there = fake_world(file, lambda it: ends if it.name == "gluon" else "well", [])
    status = run.run(PLAN, file, 3600, there._replace(set=environment.__setitem__))
    assert (status, environment) == ((0, {}) if (ends, wrong) == ("well", None) else (1, {settings.GLUON: "0"}))


def test_one_group_alone_lets_the_card_choose_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.MEASURE, "1")
    processes, given = run.Processes(tmp_path / "gpu.jsonl", tmp_path), {}
    monkeypatch.setattr(run, "Spawned", lambda command, log, environment: given.setdefault(log.stem, dict(environment)))
    for group in PLAN:
        processes.group(group, 1.0)
    assert (plan.GLUON_SETTING, plan.MEASURE_SETTING) == (settings.GLUON, settings.MEASURE)
    assert {name for name, environment in given.items() if environment[settings.MEASURE] == "1"} == {"tuned"}
    assert {environment[settings.MEASURE] for environment in given.values()} == {"0", "1"}


def test_a_run_that_is_interrupted_leaves_no_group_on_the_card(file: Path, monkeypatch: pytest.MonkeyPatch):
    now, started = [0.0], []

    def pressed(group: FakeGroup) -> None:
        raise KeyboardInterrupt

    def start(group: Group, seconds: float) -> FakeGroup:
        started.append(FakeGroup(now, Sink(file, group.name), 9.0, 0))
        return started[-1]

    monkeypatch.setattr(FakeGroup, "poll", pressed)
    with pytest.raises(KeyboardInterrupt):
        run.run(PLAN, file, 540, world(start, [], now))
    assert [group.killed for group in started] == [True]


def test_the_table_after_three_six_and_nine_minutes(file: Path):
    shown: list[str] = []
    run.run(PLAN, file, 560, fake_world(file, lambda group: "hang", shown))
    marks = {text.splitlines()[0]: text for text in shown if text.startswith("after")}
    assert list(marks) == ["after 3 minutes", "after 6 minutes", "after 9 minutes"]
    assert "smoke      failed, 90 s" in marks["after 3 minutes"]
    assert "casts      not begun" in marks["after 3 minutes"]
    assert "model      not begun" in table.text(file)
    assert not [record for record in records.read(file)[0] if record["group"] == "model" and record["kind"] == "start"]


def test_a_group_that_cannot_be_started(file: Path):
    def start(group: Group, seconds: float):
        raise OSError("no more processes")

    shown: list[str] = []
    assert run.run(PLAN, file, 540, world(start, shown, [0.0])) == 1
    assert shown[-1].count("could not be started: no more processes") == len(PLAN)


def test_results_are_read_around_a_line_that_was_cut_off(file: Path):
    sink = Sink(file, "gemm")
    sink.rows("gemm", [ROW])
    with file.open("a") as open_file:
        open_file.write('{"kind": "row", "group": "ge')  # killed here
    sink.rows("gemm", [{**ROW, "shape": [4096, 4096, 4096]}])
    with file.open("ab") as open_file:
        open_file.write(b'\xff\xfe\x00\n"text"\n[1]\n{"kind": "row"}\n')
    sink.write("row", bench="gemm", row={"name": "a row without a result"})
    found, broken = records.read(file)
    assert [record["row"].get("shape") for record in found] == [[8192] * 3, [4096] * 3, None]
    assert broken == 5
    unread = "a row without a result: this row cannot be shown", "5 lines of the file could not be read"
    for part in ("8192x8192x8192", "4096x4096x4096", *unread):
        assert part in table.text(file)


def test_the_exit_status_says_whether_something_was_wrong(file: Path):
    sink = Sink(file, "smoke")
    sink.write("check", name="fine", wrong=None)
    untimed = {key: ROW[key] for key in ("name", "shape")}
    sink.rows("gemm", [ROW, {**untimed, "correct": None, "why": "not measured: no torchao"}])
    assert not table.failed(file)
    sink.rows("gemm", [{**untimed, "correct": False, "error": 0.1, "why": "wrong result"}])
    assert table.failed(file)
    assert "1 checks, 1 of 3 rows timed, 1 WRONG" in table.text(file)


PROGRAMS = {
    "hang": ("import time; print('waiting', flush=True); time.sleep(600)", "killed: it was not done after", "waiting"),
    "signal": ("import os; os.kill(os.getpid(), 11)", "ended by signal 11 (SIGSEGV)", ""),
    "exception": ("raise RuntimeError('CUDA error: misaligned')", "exit status 1", "RuntimeError: CUDA error"),
    "out of memory": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 28,) * 2)\nbytearray(1 << 30)",
        "exit status 1", "MemoryError"),
    "garbage": ("import sys; sys.stdout.buffer.write(bytes(range(256)) * 500); sys.exit(3)", "exit status 3", "\\xa0"),
    "a child that goes on": (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "import time; time.sleep(600)",
        "killed: it was not done after", ""),
}  # fmt: skip


@pytest.mark.parametrize("bad", PROGRAMS)
def test_processes_that_fail(file: Path, bad: str):
    program, why, last = PROGRAMS[bad]
    started: list[run.Spawned] = []

    def start(group: Group, seconds: float) -> run.Spawned:
        code = program if group.name == "bad" else writing(file, "good", "'check', name='it', wrong=None")
        started.append(run.Spawned([sys.executable, "-c", code], file.parent / group.name, dict(os.environ)))
        return started[-1]

    there = run.Processes(file, file.parent).world(lambda text: None)._replace(start=start)
    plan = (Group("bad", 1.0 if "killed" in why else 60.0, ""), Group("good", 60.0, ""))
    assert run.run(plan, file, 3600, there) == 1
    for part in (why, last, "good       done", "1 checks"):
        assert part in table.text(file, plan)
    assert all(process.poll() is not None for process in started)


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, cwd="/")


def test_the_table_is_made_anew_from_a_file_and_a_group_that_does_not_exist_is_named(file: Path):
    Sink(file, "gemm").rows("gemm", [ROW])
    done = script("--table", str(file))
    assert (done.returncode, done.stdout) == (0, table.text(file) + "\n")
    assert "no group is called gem; there are gluon, smoke" in script("--groups", "gem").stderr


def test_every_group_has_work_and_work_has_a_group():
    assert set(measure.WORK) == set(NAMES)
    assert len(NAMES) == len(set(NAMES))
    assert NAMES[:6] == ("gluon", "smoke", "gemm", "casts", "linear", "block")


def test_lines_are_on_disk_at_once(file: Path):
    code = writing(file, "g", "'note', text='kept'") + "; import os; os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code])
    assert json.loads(file.read_text())["text"] == "kept"


def test_the_whole_script_on_a_pretended_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    main, pool = runpy.run_path(str(SCRIPT))["main"], []

    def group(processes: run.Processes, group: Group, seconds: float) -> run.Spawned:
        pool.extend(processes._pool)
        code = writing(processes.file, "gluon", "'note', text='on a card'")
        return run.Spawned([sys.executable, "-c", code], tmp_path / "log", dict(os.environ))

    monkeypatch.setattr(run.Processes, "group", group)
    monkeypatch.setattr(preflight, "lacks", lambda places: {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    arguments = ["--groups", "gluon", "--jobs", "2", "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    assert main() == 0
    assert len(pool) == 2
    assert all(process.poll() is not None for process in pool)
    (file,), (text,) = (list((tmp_path / "out").glob(f"*-gpu.{ending}")) for ending in ("jsonl", "txt"))
    assert text.read_text() == table.text(file, [PLAN[0]]) + "\n"
    out = capsys.readouterr().out
    for part in ("NVIDIA H200: results go to ", "gluon: on a card", "pack: "):
        assert part in out
