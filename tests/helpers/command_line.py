"""The command line, called in this process: what it answers as text and as JSON, and what it refuses."""

import json
from typing import Any

from typer.testing import CliRunner

from fp8engine.cli import app


def call(*arguments: object) -> Any:
    """Whatever comes of it."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def shown(*arguments: object) -> str:
    """What a person reads."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def told(*arguments: object) -> Any:
    """What a script reads."""
    return json.loads(shown(*arguments, "--json"))


def refused(told: str, *arguments: object, alone: bool = True) -> None:
    """Exit code 2 and one line on standard error; no traceback, nothing on standard output.

    alone: no line stands before that one, such as a library's warning.
    """
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("error: ")
    assert told in lines[-1]
    assert len(lines) == 1 or not alone
