"""Mutants of the kernels, each one bug planted on purpose: `python -m benchmarks.mutants` shows which tests find it."""
