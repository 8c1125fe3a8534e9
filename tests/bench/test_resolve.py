"""`make resolve`: what is asked of uv, and that a refusal fails.  A script plays uv: tests have no network."""

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import resolve
from benchmarks.serve import needs


@pytest.fixture
def uv(tmp_path: Path) -> Path:
    """A uv that writes down how it was called, and finds nothing for a Mac."""
    script = tmp_path / "uv"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nenv >> {tmp_path}/environment\n'
        'case "$*" in *apple*) echo "no solution" >&2; exit 1;; *overrides*) exit 0;;'
        ' *serve*) echo "there is no version of torch==2.13.0+cpu" >&2; exit 1;; esac\n'
    )
    script.chmod(0o755)
    return script


def test_every_extra_is_resolved_on_every_python_and_system():
    extras = tomllib.loads((resolve.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = resolve.installs()
    assert {extra for install in asked for extra in install.extras} == set(extras)
    assert len({(each.python, each.system) for each in asked if "dev" in each.extras}) == 12
    assert resolve.Install(("titan",), "constraints.txt", "3.11", resolve.LINUX[0]) in asked


def test_what_lies_on_this_machine_is_not_asked(uv: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(name, "/opt/wheels")
    assert resolve.refusal(str(uv), resolve.installs()[0]) == ""
    call, environment = uv.with_name("calls").read_text(), uv.with_name("environment").read_text()
    assert call.startswith("pip compile --no-config ")
    assert ("--constraints constraints.txt" in call, "--find-links" in call) == (True, False)
    assert ("MACOSX_DEPLOYMENT_TARGET=14.0" in environment, "FIND_LINKS" in environment) == (True, False)


def test_an_install_that_cannot_be_resolved_fails(uv: Path, capsys: pytest.CaptureFixture[str]):
    assert resolve.main(["--uv", str(uv)]) == 1
    lines = capsys.readouterr().out.splitlines()
    refused = [line.split()[-1] for line in lines if line.startswith("FAILED")]
    assert refused == [resolve.MAC] * 3  # three Pythons
    assert lines.count("no solution") == 3
    assert lines[-1] == f"{len(resolve.installs()) - 3} of {len(resolve.installs())} installs are as they have to be"


def test_the_serve_extra_resolves_but_for_torchs_build_for_cpus(uv: Path):
    whole, known = [install for install in resolve.installs() if install.extras == ("serve",)]
    assert (bool(whole.overrides), bool(known.overrides)) == (True, False)
    assert [resolve.refusal(str(uv), install) for install in (whole, known)] == ["", ""]
    uv.write_text("#!/bin/sh\nexit 0\n")
    assert resolve.refusal(str(uv), known).startswith("it resolves now")
    uv.write_text("#!/bin/sh\necho another reason >&2\nexit 1\n")
    assert resolve.refusal(str(uv), known) == "another reason"


def test_serve_check_names_the_build_that_is_missing_and_where_it_is(monkeypatch, capsys):
    vllm, torch = needs.pins(needs.CONSTRAINTS.read_text())
    assert torch.removesuffix("+cpu") in (resolve.ROOT / resolve.OVERRIDES).read_text().split()
    assert resolve.installs()[-2].refused == f"no version of {torch}"
    done = SimpleNamespace(returncode=1, stderr="no matching distribution")
    monkeypatch.setattr(needs.subprocess, "run", lambda *_, **__: done)
    assert needs.main() == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{vllm} asks for {torch}")
    assert f"PIP_EXTRA_INDEX_URL={needs.INDEX} make serve-check" in said
    done.returncode = 0
    assert needs.main() == 0
