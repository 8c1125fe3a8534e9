"""Conversion of a model's layers to FP8 and back: the selection of layers, the change of classes, fusion."""

from fp8engine.convert.outliers import smooth
from fp8engine.convert.revert import revert
from fp8engine.convert.swap import convert

__all__ = ["convert", "revert", "smooth"]
