"""Search for the layer and op that make NaN or Inf in a training loop (fe.amp.find_overflow).

| file | what it does |
| --- | --- |
| `reading` | smallest and largest value of a tensor, in one reduction that the host does not wait for |
| `trace` | calls of modules, readings of their tensors and what their ops made, in order of time |
| `opwise` | check of every op of a pass, forward and backward, for the first that makes NaN or Inf of finite inputs |
| `recorder` | hooks on a model that write the trace, and the choice of passes to watch op by op |
| `locate` | the findings of one pass |
| `ledger` | the findings of all passes, the same overflow once, and those that a smaller loss scale cures |
| `report` | one overflow (layer, operand, op, step), every layer's peak, the loss scales; as plain values and as text |
| `watch` | `find_overflow`, which puts these together |
"""

from fp8engine.amp.overflow.report import Finding, OverflowReport
from fp8engine.amp.overflow.watch import find_overflow

__all__ = ["Finding", "OverflowReport", "find_overflow"]
