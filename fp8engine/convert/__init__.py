"""Conversion of a model's layers to FP8: `fe.convert`, the selection of layers, and the fusion of neighbours."""

from fp8engine.convert.swap import Record, convert  # Record: pickles of 0.1 look for it here

__all__ = ["Record", "convert"]
