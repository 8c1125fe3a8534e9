"""Triton's CPU interpreter, made to compute what a GPU computes.

Left alone (Triton 3.6 to 3.9) it is wrong without a word where FP8 and BF16 are concerned: a cast to FP8 rounds ties
away, loses carries and wraps on overflow; FP32 to BF16 truncates; an FP8 NaN is read as 480; a BF16 dot multiplies
bit patterns.  Two replacements put that right, a third lets it run under any NumPy, a fourth is stricter than a GPU,
a fifth saves time:

    casts    nearest-even; to FP8 saturating with NaN kept, as PTX's cvt.rn.satfinite does; from FP8 and BF16 exact
    dot      operands as FP32 values, in which a product of two FP8, BF16 or FP16 values is exact; sums in FP32
    bounds   a loop's bound is an array of one element, which NumPy deprecates as an integer, and refuses from 2.4 on
    memory   a read or a write beside the tensors of the launch is an error: on a GPU it is one only now and then
    calls    a function that a kernel calls finds the language as its launch has changed it, and is not searched for
             what is left to change

torch does the rounding, after a clamp: what its own casts make of an overflow depends on its version.  `wrong` holds
all of it against NumPy and ml_dtypes, and conftest.py asks it before any test may speak about a kernel.
"""

import numpy as np
import torch
import triton.language as tl
from casts import FP8, MAX, NUMPY, bits, every_code, every_value, values
from triton.runtime import interpreter

TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}
TRITON = {value: key for key, value in TORCH.items()}
INTEGERS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}

_triton_convert = interpreter._convert_float
_triton_patch = interpreter._patch_lang_tensor
_triton_language = interpreter._patch_lang
_triton_arguments = interpreter.GridExecutor._init_args_hst
_triton_load = interpreter.InterpreterBuilder.create_masked_load
_triton_store = interpreter.InterpreterBuilder.create_masked_store
_triton_atomic = interpreter.InterpreterBuilder.create_atomic_rmw
_memory: list[tuple[int, int]] = []  # first address and the one behind the last, of each tensor of the launch


def convert(x: np.ndarray, source: tl.dtype, target: tl.dtype, rounding_mode=None) -> np.ndarray:
    """Values of one Triton dtype as another's, in arrays of the unsigned integers that hold their bits."""
    if source not in TORCH or target not in TORCH:
        return _triton_convert(x, source, target, rounding_mode)
    taken = np.array(x, order="C", ndmin=1)  # a copy: the interpreter's arrays may be read-only
    y = torch.from_numpy(taken.view(f"u{taken.itemsize}")).view(TORCH[source])
    if TORCH[target] in MAX:
        y = y.float().clamp(-MAX[TORCH[target]], MAX[TORCH[target]])  # a NaN passes
    y = y.to(TORCH[target])
    return y.view(INTEGERS[y.itemsize]).numpy().reshape(np.shape(x))


def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """InterpreterBuilder.create_dot: d + a @ b."""
    with np.errstate(invalid="ignore"):  # Inf by the zeros beyond a matrix's edge: no GPU remarks on that
        data = np.matmul(_numbers(a, d.data.dtype), _numbers(b, d.data.dtype)) + d.data
    return interpreter.TensorHandle(data, d.dtype.scalar)


def _numbers(x, dtype: np.dtype) -> np.ndarray:
    kind = x.dtype.scalar
    if kind in TORCH and kind != tl.float32:
        return convert(x.data, kind, tl.float32).view(np.float32).astype(dtype)
    return x.data.astype(dtype)


def patch_tensor(tensor, *scope) -> None:
    """Triton's own changes to tl.tensor while a kernel is interpreted, with an integer from an array of one element."""
    _triton_patch(tensor, *scope)
    tensor.__index__ = lambda self: self.handle.data.item()


def patch_language(fn):
    """Triton's own changes to the language, made by a launch, which takes them back, and by every call inside of it."""
    if tl.core.is_builtin(tl.load) or tl.core.is_builtin(tl.core.load):  # functions of Triton's own use tl.core
        return _triton_language(fn)
    return interpreter._LangPatchScope()


def remember(self, args, kwargs):
    """GridExecutor._init_args_hst, noting where the tensors of the launch lie."""
    tensors = [getattr(x, "base", x) for x in (*args, *kwargs.values())]
    storages = [x.untyped_storage() for x in tensors if isinstance(x, torch.Tensor)]
    _memory[:] = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
    return _triton_arguments(self, args, kwargs)


def load(self, pointers, mask, *rest, **named):
    """InterpreterBuilder.create_masked_load of addresses that belong to the launch."""
    _check(pointers, mask)
    return _triton_load(self, pointers, mask, *rest, **named)


def store(self, pointers, value, mask, *rest, **named):
    """InterpreterBuilder.create_masked_store to addresses that belong to the launch."""
    _check(pointers, mask)
    return _triton_store(self, pointers, value, mask, *rest, **named)


def atomic(self, operation, pointers, value, mask, *rest):
    """InterpreterBuilder.create_atomic_rmw at addresses that belong to the launch."""
    _check(pointers, mask)
    return _triton_atomic(self, operation, pointers, value, mask, *rest)


def _check(pointers, mask) -> None:
    # A mask made with a condition of integers is an array of 0 and 1, which are not places.
    addresses = pointers.data[np.broadcast_to(np.asarray(mask.data, dtype=bool), pointers.data.shape)]
    if addresses.size:
        first, last = int(addresses.min()), int(addresses.max()) + pointers.get_element_ty().primitive_bitwidth // 8
        if not any(start <= first and last <= end for start, end in _memory):
            raise IndexError(f"a kernel touches {first:#x} to {last:#x}, which no tensor of its launch holds")


def install() -> None:
    """Put the functions above into the interpreter for the rest of the process."""
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter._patch_lang_tensor = patch_tensor
    interpreter._patch_lang = patch_language
    interpreter.GridExecutor._init_args_hst = remember
    interpreter.InterpreterBuilder.create_masked_load = load
    interpreter.InterpreterBuilder.create_masked_store = store
    interpreter.InterpreterBuilder.create_atomic_rmw = atomic


def wrong() -> list[str]:
    """Casts of the interpreter that differ from ml_dtypes' in a single value, by name; none where it is faithful.

    From FP8: all codes.  To FP8: all 16-bit values, and as FP32 all of these.  To BF16: FP32 of every exponent, ties
    and both neighbours of a tie.
    """
    found = []
    for dtype in FP8:
        for wide in (torch.float32, torch.bfloat16, torch.float16):
            codes = every_code(dtype)
            read = _as(_bits(codes), dtype, wide).double().numpy()
            if not np.array_equal(read, values(codes), equal_nan=True):
                found.append(f"{dtype} to {wide}")
        for source in (torch.bfloat16, torch.float16):
            for wide in (source, torch.float32):
                x = every_value(source).to(wide)
                if not same_codes(bits(_as(_bits(x), wide, dtype)), nearest_fp8(x, dtype), dtype):
                    found.append(f"{source} as {wide} to {dtype}")
    x = points_of_bf16()
    if not torch.equal(_as(_bits(x), torch.float32, torch.bfloat16), nearest_bf16(x)):
        found.append("torch.float32 to torch.bfloat16")
    return found


def nearest_fp8(x: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """Bytes of x in FP8 as ml_dtypes rounds it, Inf and what is beyond MAX as MAX."""
    with np.errstate(invalid="ignore"):  # NumPy remarks on every NaN that it casts
        return np.clip(x.float().numpy(), -MAX[dtype], MAX[dtype]).astype(NUMPY[dtype]).view(np.uint8)


def same_codes(found: np.ndarray, wanted: np.ndarray, dtype: torch.dtype) -> bool:
    """Equal bytes, so that the sign of zero counts, or both NaN, whatever their bits."""
    nan = [np.isnan(codes.view(NUMPY[dtype]).astype(np.float32)) for codes in (found, wanted)]
    return bool(((found == wanted) | (nan[0] & nan[1])).all())


def points_of_bf16() -> torch.Tensor:
    """FP32 values: every finite BF16 value, the middle above it, and the FP32 values beside both."""
    x = every_value(torch.bfloat16)
    codes = x[x.isfinite()].float().numpy().view(np.uint32)
    points = np.concatenate([codes + step for step in (0, 1, 0x7FFF, 0x8000, 0x8001)])
    return torch.from_numpy(points.astype(np.uint32).view(np.float32))


def nearest_bf16(x: torch.Tensor) -> torch.Tensor:
    """Finite FP32 as BF16 in integer arithmetic: add half of what is cut off, less one where the rest is even."""
    codes = x.numpy().view(np.uint32).astype(np.uint64)
    return torch.from_numpy(((codes + 0x7FFF + ((codes >> 16) & 1)) >> 16).astype(np.uint16)).view(torch.bfloat16)


def _bits(x: torch.Tensor) -> np.ndarray:
    return x.view(INTEGERS[x.itemsize]).numpy()


def _as(x: np.ndarray, source: torch.dtype, target: torch.dtype) -> torch.Tensor:
    found = interpreter._convert_float(x, TRITON[source], TRITON[target], None)
    return torch.from_numpy(np.ascontiguousarray(found)).view(target)
