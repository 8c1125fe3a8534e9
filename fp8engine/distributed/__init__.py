"""Amaxes of several processes, joined in one all-reduce a step."""

from fp8engine.distributed.amax import reduce_amax

__all__ = ["reduce_amax"]
