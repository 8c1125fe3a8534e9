"""Measurements of a machine that a user runs: matmuls, layers and models, beside torch's and its own limits.

| file | what it holds |
| --- | --- |
| timing.py | clocks, and timing of calls in turns |
| harness.py | checked first, then timed: rows, ratios, limits of the machine, text |
| cases.py, models.py | what is measured: shapes and operands of matmuls; models of transformers |
| gemm.py, linear.py, steps.py | one benchmark each: its cases, its variants, its check |
| predict.py | predicted times of a model's linear layers, without a card |

Needs torch and nothing else, but transformers for models; Triton where there is a card for it.  Casts, blocks,
experts, generation and the tuner are in benchmarks/, and need a checkout.
"""
