"""What is decided from a machine's abilities, on machines that are not here: cards and CPUs are faked."""

import subprocess
import sys

import pytest
import torch

from fp8engine.ops import casts, device, matmul, reference, triton_backend
from fp8engine.ops.reference.matmul import SMALL

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Capability, has_fp8, dtype of an emulated product, backend of a matmul without and with scales along K.
CARDS = {
    "V100": ((7, 0), False, torch.float16, "reference", "reference"),
    "T4": ((7, 5), False, torch.float16, "reference", "reference"),
    "A100": ((8, 0), False, torch.bfloat16, "reference", "reference"),
    "A10": ((8, 6), False, torch.bfloat16, "reference", "reference"),
    "L4": ((8, 9), True, torch.bfloat16, "cublas", "triton"),
    "H100": ((9, 0), True, torch.bfloat16, "cublas", "triton"),
    "B200": ((10, 0), True, torch.bfloat16, "cublas", "triton"),  # (10, 0) > (8, 9) as numbers, not as text
}
# The instructions a CPU has, whether its BF16 products are fast, backend of a matmul.
CPUS = {
    "Haswell": ((), False, "reference"),
    "Ice Lake": (("avx512_f", "avx512_vnni"), False, "reference"),
    "Zen 4": (("avx512_bf16",), True, "reference"),
    "Sapphire Rapids": (("avx512_bf16", "amx_bf16"), True, "reference"),
    "Graviton 3": (("bf16", "sve_bf16"), True, "reference"),
    "Diamond Rapids": (("amx_bf16", "amx_fp8"), True, "cublas"),
}
pytestmark = pytest.mark.usefixtures("pretended")  # what has been asked of the real machine is asked again


@pytest.mark.parametrize(("card", "counted"), [("MI250", (9, 0)), ("MI300X", (9, 4)), ("RX 7900", (11, 0))])
def test_an_amd_card_is_no_hopper_and_no_blackwell(card: str, counted: tuple, pretended, monkeypatch):
    """torch calls it "cuda", and its gfx942 is (9, 4)."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    pretended(counted, f"AMD {card}")
    assert device.capability(CUDA) == (0, 0)
    assert not device.has_fp8(CUDA)
    assert device.product_dtype(CUDA) == torch.float32
    assert matmul.choose(CUDA, by_block=False) == matmul.choose(CUDA, by_block=True) == "reference"
    assert matmul.choose_16_bits(CUDA, (8192, 8192)) == "torch"
    assert matmul.why_emulated(CUDA, "reference") == (
        f"AMD {card} is an AMD card, for whose FP8 formats (FNUZ on MI300) no kernel here is written"
    )


@pytest.mark.parametrize("card", CARDS)
def test_cards(card: str, pretended):
    capability, has_fp8, product, backend, by_block = CARDS[card]
    pretended(capability, f"NVIDIA {card}")
    assert device.capability(CUDA) == capability
    assert device.has_fp8(CUDA) is has_fp8
    assert device.product_dtype(CUDA) == product
    # A card's set-up costs the same for any size: only a CPU holds small operands in FP32.
    assert reference.emulation_dtype(CUDA, 1) == reference.emulation_dtype(CUDA, 1 << 20) == product
    assert matmul.choose(CUDA, by_block=False) == backend
    assert matmul.choose(CUDA, by_block=True) == by_block
    assert casts.choose(CUDA) == ("triton" if has_fp8 else "reference")
    why = f"NVIDIA {card} has no FP8 Tensor Cores; sm_89 or later has"
    assert (triton_backend.no_card(CUDA) or "").startswith("" if has_fp8 else why)
    assert (triton_backend.no_card(CUDA) is None) == has_fp8
    why = triton_backend.no_card(CUDA, triton_backend.CAPABILITY_16_BITS)
    assert (why is None) == (capability >= (8, 0))
    assert why is None or f"NVIDIA {card} has no path of Triton's to its Tensor Cores; sm_80 or" in why
    assert bool(matmul.why_emulated(CUDA, "cublas")) is not has_fp8
    assert matmul.why_emulated(CUDA, "reference")
    assert device.name(CUDA) == f"NVIDIA {card}"


@pytest.mark.parametrize("cpu", CPUS)
def test_cpus(cpu: str, monkeypatch: pytest.MonkeyPatch):
    instructions, bf16, backend = CPUS[cpu]
    known = {"architecture": "any", **dict.fromkeys(("avx512_bf16", "amx_bf16", "amx_fp8"), False)}
    known |= dict.fromkeys(instructions, True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    product = torch.bfloat16 if bf16 else torch.float32
    assert device.product_dtype(CPU) == reference.emulation_dtype(CPU, SMALL) == product
    assert reference.emulation_dtype(CPU, SMALL - 1) == torch.float32
    assert (device.has_fp8(CPU), device.capability(CPU)) == (False, (0, 0))
    assert matmul.choose(CPU, by_block=False) == backend
    assert matmul.choose(CPU, by_block=True) == "reference"
    # Not even a CPU that multiplies FP8 has Tensor Cores: a report must not count it as one.
    assert matmul.why_emulated(CPU, backend)


@pytest.mark.parametrize("kind", ["meta", "mps"])
def test_any_other_device_emulates_in_fp32(kind: str):
    where = torch.device(kind)
    assert device.product_dtype(where) == reference.emulation_dtype(where, 1 << 20) == torch.float32
    assert not device.has_fp8(where)
    assert matmul.choose(where, by_block=False) == "reference"
    assert device.name(where) == kind


def test_a_machine_is_asked_once(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: asked.append(where) or (9, 0))
    for _ in range(3):
        assert matmul.choose(CUDA, by_block=False) == "cublas"
    assert asked == [CUDA]


def test_importing_asks_nothing_of_the_machine():
    """Every question is made to raise, then everything that does not compute is used."""
    code = """
import time, torch
def refuse(*_, **__): raise SystemExit("the machine was asked")
for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_device_name",
             "get_device_properties", "_lazy_init", "init"):
    setattr(torch.cuda, name, refuse)
torch.cpu.get_capabilities = refuse
import fp8engine as fe
from fp8engine import report
from fp8engine.convert import select
from fp8engine.ops import casts, device, matmul, reference, scaled_mm
layer = fe.Linear(8, 8, recipe=fe.delayed())
assert "E4M3" in str(fe.rowwise()) + repr(layer)
assert device.cpu_multiplies.cache_info().currsize == device.capability.cache_info().currsize == 0
assert device.cpu_timings.cache_info().currsize == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
