"""Measurements: how fast the matmuls are here, against torch's and against what the machine can do.

| file | question |
| --- | --- |
| timing.py | how long a call takes, fairly |
| cases.py | which shapes, which operands, and whether a result is right |
| roofline.py | what the machine can do at most |
| run.py | every way to multiply, checked, then timed |
| tune.py | which configuration of a kernel is fastest |
| codegen.py, offline.py, sass.py | what the kernels compile to for a card that is not there |

Needs torch and nothing else; Triton where there is a card for it.
"""
