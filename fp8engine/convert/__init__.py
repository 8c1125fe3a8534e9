"""Conversion of a model's layers to FP8 and back: the selection of layers, the change of classes, fusion."""

from fp8engine.convert.outliers import smooth
from fp8engine.convert.swap import convert
from fp8engine.convert.undo import revert

__all__ = ["convert", "revert", "smooth"]
