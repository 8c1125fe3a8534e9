"""torch.compile of every Hugging Face family that fe.convert(fuse=True) knows, with gradients and without.

The two modes take different ways through Dynamo: with gradients an autograd Function becomes a subgraph, without them its
forward is inlined.
"""

import copy

import pytest
import torch
from hf.families import FAMILIES
from hf.fusing import logits
from support import converted, same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh():
    """No graph of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fused_family_compiles_in_both_modes(name: str):
    family = FAMILIES[name]
    eager = converted(family.build(), "current", fuse=True)
    batch = family.batch(2)
    plain = copy.deepcopy(eager)
    # Experts leave the graph: the number of their rows differs from step to step.
    compiled = torch.compile(plain, fullgraph=not family.experts, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(logits(compiled(**batch)), logits(eager(**batch)))
    losses = []
    for call in (compiled, eager):
        loss = call(**batch).loss
        loss.backward()
        losses.append(loss.detach())
    assert same(losses[:1], losses[1:])
    for (key, one), (_, other) in zip(plain.named_parameters(), eager.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), key
        assert one.grad is None or torch.equal(one.grad, other.grad), key
