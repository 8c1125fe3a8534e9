"""Training on several processes: amaxes joined over them, and gradients reduced in FP8."""

from fp8engine.distributed.amax import reduce_amax
from fp8engine.distributed.gradients import fp8_gradient_hook, fp8_gradients

__all__ = ["fp8_gradient_hook", "fp8_gradients", "reduce_amax"]
