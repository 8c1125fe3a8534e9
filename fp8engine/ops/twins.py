"""Casts and matmul of the reference, under the names and signatures of casts.py and matmul.py.

A layer's call takes them where nothing else could be chosen: in eager code, on a CPU that multiplies no FP8.  The
numbers are those of the operations that choose; a third of a small layer's Python calls is saved.
"""

from fp8engine.ops.reference import cast_transpose
from fp8engine.ops.reference import emulate as matmul
from fp8engine.ops.reference.quantize import quantize_operand as quantize

__all__ = ["cast_transpose", "matmul", "quantize"]
