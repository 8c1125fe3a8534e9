"""Small kernels written in PTX, run on the emulated card: one CTA, pointers to NumPy arrays as arguments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from emulator.device_memory import Allocation
from emulator.launch import Launch
from emulator.reader import read
from emulator.scheduler import prepare
from emulator.tma import TensorMap

REGISTERS = """.reg .pred %p<64>; .reg .b16 %rs<64>; .reg .b32 %r<256>; .reg .b64 %rd<64>;"""


def text(body: str, arrays: Sequence[np.ndarray | TensorMap], threads: int = 32, limits: str = "") -> str:
    """A module of one kernel, k: addresses of its arrays and maps in %rd0, %rd1, ..., and %tid.x in %r0.

    limits: directives beside .reqntid.
    """
    given = ",\n".join(f".param .u64 k_param_{place}" for place in range(len(arrays)))
    loads = "\n".join(
        f"mov.b64 %rd{place}, k_param_{place};"
        if isinstance(array, TensorMap)
        else f"ld.param.b64 %rd{place}, [k_param_{place}];"
        for place, array in enumerate(arrays)
    )
    head = f".visible .entry k(\n{given}\n)\n.reqntid {threads}\n{limits}\n{{\n{REGISTERS}\n{loads}\n"
    return f"{head}mov.u32 %r0, %tid.x;\n{body}\nret;\n}}\n"


def run(
    body: str,
    arrays: Sequence[np.ndarray | TensorMap],
    *,
    threads: int = 32,
    shared: int = 4096,
    ctas: int = 1,
    seed: int | None = None,
) -> Launch:
    """Execute the body on the arrays, which it changes in place.  A TensorMap is passed by value: take its address."""
    return execute(text(body, arrays, threads), arrays, shared=shared, ctas=ctas, seed=seed)


def execute(
    module: str, arrays: Sequence[np.ndarray | TensorMap], *, shared: int = 4096, ctas: int = 1, seed: int | None = None
) -> Launch:
    """Execute a module of one kernel, as `text` writes it, on the arrays."""
    program = read(module)
    plain = [array for array in arrays if not isinstance(array, TensorMap)]
    regions = [Allocation(array.ctypes.data, array.ctypes.data + array.nbytes) for array in plain]
    arguments = [array if isinstance(array, TensorMap) else array.ctypes.data for array in arrays]
    launch = Launch(program, prepare(program), arguments, (ctas, 1, 1), shared, regions)
    launch.run(seed)
    return launch


def several(instruction: str, inputs: Sequence[np.ndarray], size: int, kind: str = "r") -> np.ndarray:
    """What `instruction` (of IN0, IN1, ... and OUT) makes of the elements of its inputs, as unsigned integers."""
    count = len(inputs[0])
    padded = -(-count // 32) * 32
    registers = {1: "rs", 2: "rs", 4: "r", 8: "rd"}
    arrays, body = [], []
    for place, values in enumerate(inputs):
        array = np.zeros(padded, values.dtype)
        array[:count] = values
        arrays.append(array)
        width = values.dtype.itemsize
        body += [
            f"mad.wide.u32 %rd{20 + place}, %r0, {width}, %rd{place};",
            f"ld.global.b{8 * width} %{registers[width]}{40 + place}, [%rd{20 + place}];",
        ]
        instruction = instruction.replace(f"IN{place}", f"%{registers[width]}{40 + place}")
    out = np.zeros(padded, f"u{size}")
    body += [
        instruction.replace("OUT", f"%{kind}50"),
        f"mad.wide.u32 %rd40, %r0, {size}, %rd{len(arrays)};",
        f"st.global.b{8 * size} [%rd40], %{kind}50;",
    ]
    run("\n".join(body), [*arrays, out], threads=padded)
    return out[:count]
