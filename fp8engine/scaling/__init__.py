"""The scaling table of a model, its histories and counters, and the histograms from which casts are predicted."""

from fp8engine.scaling.table import ScalingState, SlotView

__all__ = ["ScalingState", "SlotView"]
