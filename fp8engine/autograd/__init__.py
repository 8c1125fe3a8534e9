"""Autograd functions: the matmuls of a layer under a recipe, without parameters or state of their own."""

from fp8engine.autograd.linear import Layer, linear
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.produce import Memory, NormOf

__all__ = ["Layer", "Memory", "NormOf", "Numerics", "linear"]
