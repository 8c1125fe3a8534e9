"""torch.compile of Hugging Face families under fe.convert(fuse=True), one of each way through their producers.

The two modes take different ways through Dynamo: with gradients an autograd Function becomes a subgraph, without them
its forward is inlined.

    phi3       RMSNorm; q, k, v in one layer and gate, up in one, split by the model's own code
    gpt2       LayerNorm, Conv1D, an activation without gate
    phi        attention and MLP beside each other, which read one norm
    bert       norms after the residual: an MLP without a norm; a padding mask
    t5-v1.1    q, k, v and gate, up as layers of their own; cross-attention, which reads another model's states
    qwen2_moe  experts, and an expert that all tokens pass

The others differ in names alone.  That their blocks compute what they did is tested in eager code, of every family
(tests/convert/test_fuse.py); training in one graph under other recipes and for several batches in test_compile.py.
"""

import copy

import pytest
import torch
from hf_families import FAMILIES
from hf_fusing import logits
from support import converted

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

WAYS = ("phi3", "gpt2", "phi", "bert", "t5-v1.1", "qwen2_moe")
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")


def equal(name: str, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit; GPT-2's within what one FP8 code in few moves, because a graph lays its transposed weights out anew,
    and so sums in another order."""
    if name == "gpt2":
        return bool((one - other).norm() <= 1e-2 * other.norm())
    return torch.equal(one, other)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WAYS)
def test_a_fused_family_compiles_in_both_modes(name: str):
    family = FAMILIES[name]
    one_layer = {key: 1 for key in DEPTHS if key in family.options}
    eager = converted(family.build(**one_layer), "current", fuse=True)
    eager.loss_type = eager.loss_type or "ForCausalLM"  # GPT-2's is guessed, with a warning that ends a graph
    for part in eager.modules():  # torch 2.11's Dynamo cannot copy the config that a cache is made from
        if hasattr(part, "config"):
            part.config.use_cache = False
    batch = family.batch(2)
    plain = copy.deepcopy(eager)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert equal(name, logits(compiled(**batch)), logits(eager(**batch)))
    losses = []
    for call in (compiled, eager):
        loss = call(**batch).loss
        loss.backward()
        losses.append(loss.detach())
    assert equal(name, *losses)
    for (key, one), (_, other) in zip(plain.named_parameters(), eager.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), key
        assert one.grad is None or equal(name, one.grad, other.grad), key
