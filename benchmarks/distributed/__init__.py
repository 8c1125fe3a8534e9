"""Distributed training on gloo, measured: `python -m benchmarks.distributed` runs every part and writes its tables."""
