"""The command line: `fp8engine train | inspect | compare | export | plan | doctor | bench`, each with `--json`.

Exit codes: 0 done; 1 doctor found something broken; 2 asked for something impossible; 130 stopped by Ctrl-C.
"""

import io
import sys

from fp8engine.cli import bench, compare, doctor, export, inspect, plan, train
from fp8engine.cli.shared import app


def main() -> None:
    """What the `fp8engine` script and `python -m fp8engine` run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where it is not UTF-8, what it cannot say is "?" and no error
    app(prog_name="fp8engine")


__all__ = ["app", "bench", "compare", "doctor", "export", "inspect", "main", "plan", "train"]
