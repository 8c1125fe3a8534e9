"""Autograd functions: the matmuls of a layer under a recipe, without parameters or state of their own."""

from fp8engine.functional.linear import linear
from fp8engine.functional.mlp import norm_mlp
from fp8engine.functional.norm_linear import norm_linear
from fp8engine.functional.numerics import Numerics
from fp8engine.functional.parts import Layer, Memory, NormOf

__all__ = ["Layer", "Memory", "NormOf", "Numerics", "linear", "norm_linear", "norm_mlp"]
