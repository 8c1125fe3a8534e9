"""Autograd functions: the matmuls of a layer under a recipe, without parameters or state of their own."""

from fp8engine.autograd.linear import linear
from fp8engine.autograd.mlp import norm_mlp
from fp8engine.autograd.norm_linear import norm_linear
from fp8engine.autograd.numerics import Numerics
from fp8engine.autograd.parts import Layer, Memory, NormOf

__all__ = ["Layer", "Memory", "NormOf", "Numerics", "linear", "norm_linear", "norm_mlp"]
