"""Overflow debugging: fe.amp.find_overflow watches a training loop for NaN and Inf and names the guilty layer and op.

| file | what it does |
| --- | --- |
| `reading` | smallest and largest value of a tensor, in one reduction that the host does not wait for |
| `trace` | calls of modules and what was seen of their tensors, in order of time |
| `opwise` | every op of a pass checked, forward and backward: the first that makes NaN or Inf of finite inputs |
| `recorder` | hooks on a model that write the trace, and choose the passes that are watched op by op |
| `finding` | one overflow: layer, operand, op, step |
| `locate` | findings from a pass of the trace |
| `ledger` | findings of all passes: which are the same overflow, and which a smaller loss scale cures |
| `report` | every layer's peak, the findings and the loss scales as plain values and as text |
| `watch` | `find_overflow`: all of these together |
"""

from fp8engine.amp.overflow.finding import Finding
from fp8engine.amp.overflow.report import OverflowReport
from fp8engine.amp.overflow.watch import find_overflow

__all__ = ["Finding", "OverflowReport", "find_overflow"]
