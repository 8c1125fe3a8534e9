"""Data flow between the layers of any nn.Module, recorded in one forward without tracing the user's Python."""

from fp8engine.auto.flow.record import record
from fp8engine.auto.flow.result import Consumer, Flow, Layer

__all__ = ["Consumer", "Flow", "Layer", "record"]
