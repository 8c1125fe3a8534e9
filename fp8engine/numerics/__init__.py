"""Formats, casts, recipes and the cost model of FP8: frozen values, no tensors."""
