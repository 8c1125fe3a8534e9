"""Training on several processes: amaxes joined over ranks; weights sharded by fully_shard and gathered in FP8."""

from fp8engine.distributed.amax import reduce_amax
from fp8engine.distributed.fsdp import fsdp
from fp8engine.distributed.plan import Plan, plan

__all__ = ["Plan", "fsdp", "plan", "reduce_amax"]
