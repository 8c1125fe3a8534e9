"""Conversion of a model's layers to FP8: `fe.convert`, the selection of layers, and the fusion of neighbours."""

from fp8engine.convert.swap import convert

__all__ = ["convert"]
