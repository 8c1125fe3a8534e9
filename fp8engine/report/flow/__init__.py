"""Data flow between the layers of any nn.Module, recorded in one forward without tracing the user's Python."""

from fp8engine.report.flow.graph import Consumer, Layer
from fp8engine.report.flow.record import record
from fp8engine.report.flow.result import Flow

__all__ = ["Consumer", "Flow", "Layer", "record"]
