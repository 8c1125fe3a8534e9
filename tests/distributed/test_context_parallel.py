"""torch's context_parallel round a converted model: two ranks with parts of each sequence are one process.

torch's ring of attention is for cards.  Here it calls a CPU's attention in the same way: what is sent, masked, merged
and balanced is torch's, and so is the cutting of a batch, which writes into its tensors and changes their shapes.
"""

import warnings
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from ranks import FLIPS, error, exact
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.nn.linear import float8_modules

pytestmark = pytest.mark.slow
RANKS, LENGTH, STEPS = 2, 32, 3
RECIPES: dict[str, str | fe.Recipe] = {
    name: name for name in ("current", "rowwise", "rowwise_gw_hp", "blockwise", "mxfp8", "bf16")
}
# A margin of 2^4 keeps predicted scales from being replaced by measured ones, which are each rank's own.
RECIPES |= {"delayed": fe.delayed(history=1, margin=4), "auto": fe.auto(interval=1)}
aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# A scale that each rank measures of its own part rounds E4M3 by 2^-5.3 in the mean, and one process otherwise: 3.6 % of
# each operand, and of a gradient that has passed 14 matmuls sqrt(14) times as much.
MEASURED = 2.0**-2
IN_16_BITS = 2.0**-7  # operands of a weight's gradient, and each rank's part of it, rounded by 2^-9 each


def attention(op: Any, args: tuple, kwargs: dict) -> tuple:
    """torch's ring round the attention of a CPU, of DTensors that are divided along the sequence."""
    mesh, (q, k, v) = args[0].device_mesh, [each.to_local() for each in args[:3]]
    dropout, causal = (*args[3:], 0.0, False)[:2]
    found = ring._templated_ring_attention(
        mesh.get_group(), 2, FORWARD, q, k, v, is_causal=bool(causal), dropout_p=dropout, **kwargs
    )
    return tuple(DTensor.from_local(each, mesh, [Shard(2)], run_check=False) for each in found[:2])


def attention_backward(op: Any, args: tuple, kwargs: dict) -> tuple:
    mesh, (dy, q, k, v, y, lse) = args[0].device_mesh, [each.to_local() for each in args[:6]]
    dropout, causal = args[6:]
    given = {"grad_out": dy, "query": q, "key": k, "value": v, "out": y, "logsumexp": lse}
    found = ring._templated_ring_attention_backward(
        mesh.get_group(), 2, BACKWARD, grad_out_name="grad_out", is_causal=causal, dropout_p=dropout, **given, **kwargs
    )
    return tuple(DTensor.from_local(each, mesh, [Shard(2)], run_check=False) for each in found[:3])


def model(recipe: str) -> Any:
    torch.manual_seed(0)
    return fe.convert(tiny_models.llama(attn_implementation="sdpa"), exact(RECIPES[recipe]))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, what follows each of them, and their positions.

    The first step's tokens are equal, so that ranks, which measure then, measure what one process does.
    """
    tokens = torch.randint(0, 30, (2, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    tokens = tokens if step else tokens.fill_(3)
    return tokens[:, :-1].clone(), tokens[:, 1:].clone(), torch.arange(LENGTH).repeat(2, 1)


def apart(recipe: str, mesh: Any) -> dict[str, Any]:
    """Of each step, how far its logits and its gradients are from one process's, which begins with equal weights.

    Beside them the recipes that layers follow in the end.
    """
    alone, mine = model(recipe), model(recipe)
    fe.distributed.reduce_amax(mine, mesh.get_group())
    found: dict[str, Any] = {"logits": [], "gradients": []}
    for number in range(STEPS):
        tokens, following, places = batch(number)
        wanted = stepped(alone, tokens, following, places)
        with context_parallel(mesh, buffers=[tokens, following, places], buffer_seq_dims=[1, 1, 1]):
            part = stepped(mine, tokens, following, places)
        found["logits"].append(error(context_parallel_unshard(mesh, [part], [1])[0], wanted))
        far = []
        for p, q in zip(mine.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(p.grad)
            far.append(error(p.grad, q.grad))
            with torch.no_grad():
                q -= 0.1 * q.grad
                p.copy_(q)
            p.grad = q.grad = None
        if number:  # of equal tokens those of q and k are rounding alone
            found["gradients"].append(max(far))
    found["recipes"] = [str(layer.numerics.recipe) for layer in float8_modules(mine)]
    return found


def stepped(converted: nn.Module, tokens: torch.Tensor, following: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    logits = converted(input_ids=tokens, position_ids=places).logits
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), following.flatten(), reduction="sum")
    (loss / (2 * LENGTH)).backward()
    return logits.detach()


def work(rank: int, ranks: int) -> dict[str, dict]:
    warnings.simplefilter("ignore")
    ring.custom_ops |= {FORWARD: attention, BACKWARD: attention_backward}
    mesh = init_device_mesh("cpu", (ranks,))
    return {recipe: apart(recipe, mesh) for recipe in RECIPES}


@pytest.fixture(scope="module")
def every_rank() -> list[dict]:
    """What each rank found."""
    return run(work, RANKS)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_gw_hp", "blockwise", "mxfp8", "bf16"])
def test_ranks_with_parts_of_each_sequence_are_one_process(recipe: str, every_rank: list[dict]):
    for found in (rank[recipe] for rank in every_rank):
        assert max(found["logits"]) < FLIPS
        assert max(found["gradients"]) < (IN_16_BITS if recipe in ("rowwise_gw_hp", "bf16") else FLIPS)


def test_measured_scales_are_each_ranks_own(every_rank: list[dict]):
    for found in (rank["current"] for rank in every_rank):
        assert max(found["gradients"]) < MEASURED


def test_predicted_scales_are_those_of_one_process(every_rank: list[dict]):
    for found in (rank["delayed"] for rank in every_rank):
        assert max(found["logits"]) < FLIPS
        assert max(found["gradients"]) < MEASURED


def test_ranks_decide_alike(every_rank: list[dict]):
    one, other = (rank["auto"]["recipes"] for rank in every_rank)
    assert one == other
    assert max(every_rank[0]["auto"]["gradients"]) < MEASURED
