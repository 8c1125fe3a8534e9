"""Whether `record.py` gives the same bits on other CPUs: emulated ones, and this one with a pin taken away.

    PYTHONPATH=tests python -m golden.agree [GROUP ...]        default: bf16_products, gpt

Emulated CPUs need qemu-x86_64 (Debian's qemu-user), which computes floats in software: a group takes tens of minutes.
They must agree.  A run without a pin may differ: then the pin is needed on this machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from golden import record

CPUS = ("Nehalem", "Haswell-noTSX", "EPYC")  # no AVX; AVX2 and FMA; the same from AMD, for which MKL chooses otherwise
LEAST = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
PINS = ("ATEN_CPU_CAPABILITY", "GLIBC_TUNABLES", "MKL_CBWR", "NPY_DISABLE_CPU_FEATURES", "OPENBLAS_CORETYPE")


def compare(what: str, group: str, prefix: list[str], env: dict[str, str]) -> bool:
    """Record the group so, print what differs from golden.json; whether nothing does."""
    wanted = record.read(Path(__file__).with_name("golden.json"))["runs"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [*prefix, sys.executable, record.__file__, str(out), f"--here={group}"]
        if subprocess.run(command, env=env, stderr=subprocess.DEVNULL).returncode:
            print(f"{group}, {what}: did not run", flush=True)
            return False
        found = record.read(out)["runs"]
    lines = list(record.differences({name: wanted[name] for name in found}, found))
    print(f"{group}, {what}: {len(found) - len(lines)} of {len(found)} runs agree", *lines[:3], sep="\n  ", flush=True)
    return not lines


def main(*groups: str) -> None:
    """Everything; exit status 1 where an emulated CPU, or other limits on this one, disagree."""
    same = True
    for group in groups or ("bf16_products", "gpt"):
        env = record.environment()
        same &= compare("again", group, [], env)
        same &= compare("further limits", group, [], {**env, **LEAST})
        for pin in PINS:
            compare(f"without {pin}", group, [], {k: v for k, v in env.items() if k != pin})
        for cpu in CPUS if shutil.which("qemu-x86_64") else ():
            same &= compare(cpu, group, ["qemu-x86_64", "-cpu", cpu], env)
    sys.exit(not same)


if __name__ == "__main__":
    main(*sys.argv[1:])
