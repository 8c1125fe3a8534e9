"""Autograd functions: the matmuls of a layer under a recipe, without parameters or state of their own."""

from fp8engine.functional.linear import linear
from fp8engine.functional.numerics import Numerics

__all__ = ["Numerics", "linear"]
