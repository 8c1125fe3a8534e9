"""The scaling table of a model, its histories and counters, and the histograms from which casts are predicted."""

from fp8engine.scaling.slot_view import SlotView
from fp8engine.scaling.table import ScalingState

__all__ = ["ScalingState", "SlotView"]
