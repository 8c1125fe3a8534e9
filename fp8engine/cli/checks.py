"""Checks of a machine for `fp8engine doctor`: installed versions, devices, and each recipe on each device.

A recipe is tried with one small Linear, forward and backward, against float32 matmuls.
"""

from __future__ import annotations

import math
import platform
import re

import torch

from fp8engine.bench.harness import version
from fp8engine.nn import Linear
from fp8engine.numerics.cast import PerBlock
from fp8engine.numerics.formats import word
from fp8engine.numerics.recipe import RECIPES, Recipe, resolve
from fp8engine.ops import device, matmul, triton_backend

NOT_TUNED = (
    "nobody has measured our Triton matmuls on such a card, so torch's scaled matmul is used where it can be; "
    "'python -m benchmarks.tune --write' in a checkout measures them"
)
# Installed versions that work: at least the first, below the second.  As pyproject.toml says.
NEEDED = {"torch": ((2, 11), None), "triton": ((3, 6), (3, 10))}
OPTIONAL = {"transformers": "hf", "matplotlib": "report", "scikit-learn": "examples"}  # package -> extra
FP8_ERROR = 0.1  # relative; three random matmuls in E4M3 or E5M2 are at 0.03 to 0.06


def examine() -> dict:
    """All findings as plain values; "problems" is empty where everything needed works."""
    notes = []
    versions = {name: version(name) for name in (*NEEDED, *OPTIONAL)}
    problems = [problem for name in NEEDED for problem in _version_problems(name, versions[name])]
    for name, extra in OPTIONAL.items():
        if versions[name] is None:
            notes.append(f"{name} is not installed: pip install 'fp8engine[{extra}]' brings it")
    present = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    devices = []
    for where in present:
        try:
            devices.append(_device(where))
        except RuntimeError as error:  # a driver that does not answer
            problems.append(f"{where} does not work: {str(error).splitlines()[0]}")
            continue
        rows = devices[-1]["recipes"]
        problems += [f"{where}, recipe {row['recipe']}: {row['trouble']}" for row in rows if row["trouble"]]
        notes += _card_notes(where)
    if len(present) == 1:
        notes.append(_no_card())
    about = {"python": platform.python_version(), "versions": versions, "torch_cuda": torch.version.cuda}
    return {"ok": not problems, "problems": problems, "notes": notes, **about, "devices": devices}


def _version_problems(name: str, installed: str | None) -> list[str]:
    lowest, beyond = NEEDED[name]
    needed = name + ">={}.{}".format(*lowest) + (",<{}.{}".format(*beyond) if beyond else "")
    if installed is None:
        return [] if name == "triton" else [f"{name} is not installed; needed: {needed}"]
    numbers = tuple(map(int, re.findall(r"\d+", installed)[:2]))
    if numbers < lowest or (beyond and numbers >= beyond):
        return [f"{name} {installed} is installed; needed: {needed} (pip install '{needed}')"]
    return []


def _device(where: torch.device) -> dict:
    """One device, and how each recipe runs on it."""
    found: dict = {
        "device": str(where),
        "name": device.name(where),
        "fp8": device.has_fp8(where),
        "emulates_in": word(device.product_dtype(where)),
        "recipes": [_try(resolve(name), where) for name in RECIPES if resolve(name).is_fp8],
    }
    if where.type == "cuda":
        found["capability"] = _architecture(where)
        found["memory_gib"] = round(torch.cuda.get_device_properties(where).total_memory / 2**30, 1)
    else:
        found["capability"] = torch.backends.cpu.get_cpu_capability()
        found["threads"] = torch.get_num_threads()
        found["milliseconds"] = device.cpu_timings()
    return found


def _architecture(where: torch.device) -> str:
    """An NVIDIA card's "sm_90", an AMD card's "gfx942"."""
    if device.is_amd(where):
        return torch.cuda.get_device_properties(where).gcnArchName.partition(":")[0]
    return "sm_{}{}".format(*device.capability(where))


def _try(recipe: Recipe, where: torch.device) -> dict:
    backend = matmul.choose(where, any(isinstance(cast.granularity, PerBlock) for cast in recipe.casts))
    why = matmul.why_emulated(where, backend)
    found = {"recipe": recipe.name, "backend": backend, "emulated": why is not None, "why": why}
    return {**found, "trouble": _trouble(recipe, where)}


def _trouble(recipe: Recipe, where: torch.device) -> str | None:
    """Why a 64x32 Linear under the recipe is wrong; None where its results are within FP8's error."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 32, generator=generator).to(where) for rows in (48, 64))
    try:
        layer = Linear(32, 64, bias=False, recipe=recipe, device=where)
        layer.weight.data.copy_(weight)
        y = layer(leaf := x.clone().requires_grad_())
        y.backward(y.detach())
        want = x @ weight.t()
        found = {"output": y.detach(), "input gradient": leaf.grad, "weight gradient": layer.weight.grad}
        exact = {"output": want, "input gradient": want @ weight, "weight gradient": want.t() @ x}
        errors = {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
    except Exception as error:  # any: it becomes a line of the report
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else math.inf)
    return None if errors[worst] < FP8_ERROR else f"the {worst} is off by {errors[worst]:.0%}"


def _card_notes(where: torch.device) -> list[str]:
    if where.type != "cuda":
        return []
    if device.has_fp8(where):
        newer = "; ".join(triton_backend.on_blackwell(where).values())
        return [] if _tuned(where) else [f"{where}: {newer or NOT_TUNED}"]
    if device.is_amd(where):
        return [f"{where}: {device.why_no_fp8(where)}: FP8 is emulated, in FP32, and slower than 16 bits"]
    capability = _architecture(where)
    if capability == "sm_70" and "sm_70" not in torch.cuda.get_arch_list():
        return [
            f"{where} is a V100 (sm_70), which this torch was not built for: "
            "pip install torch --index-url https://download.pytorch.org/whl/cu126"
        ]
    return [f"{where} ({capability}) has no FP8 Tensor Cores (sm_89 or later has): FP8 is emulated"]


def _tuned(where: torch.device) -> bool:
    """Whether kernels/tuning.json has measurements of such a card."""
    sizes = ((8192, 8192), (1024, 2048), (64, 1024))
    return any(triton_backend.measured("matmul_fp8", device.capability(where), *size) > 0 for size in sizes)


def _no_card() -> str:
    if torch.version.cuda is None:
        return "this torch is built without CUDA: FP8 is emulated on the CPU, exact in its values, not faster for it"
    return f"torch is built for CUDA {torch.version.cuda} but finds no card: FP8 is emulated on the CPU"
