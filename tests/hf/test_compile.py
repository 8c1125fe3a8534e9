"""torch.compile of converted transformers: one graph for every batch, and eager code's results, with fused blocks too.

Sizes are symbols in the second graph, which a recipe meets in three ways: scales updated before the forward (delayed),
one for each of a number of rows (rowwise), rows rounded up to blocks (blockwise).  All recipes: tests/laws.  All
families in eager code: tests/convert/test_fuse.py.
"""

import copy
from typing import Any

import pytest
import torch
from hf_families import FAMILIES
from hf_fusing import logits
from support import converted, same, tables
from torch._dynamo.utils import counters

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

WAYS = (  # one family of each way through its producers; the others differ in names alone
    "qwen2_moe",  # experts, and an expert that all tokens pass
    "gpt2",  # LayerNorm, Conv1D, an activation without gate
    "phi",  # attention and MLP beside each other, which read one norm
    "bert",  # norms after the residual: an MLP without a norm; a padding mask
    "t5-v1.1",  # q, k, v and gate, up as layers of their own; cross-attention, which reads another model's states
    "phi3",  # RMSNorm; q, k, v in one layer and gate, up in one, split by the model's own code
)
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")


def train(model: Any, call: Any, batches: list[dict]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "recipe"), [("llama", "delayed"), ("bert", "rowwise"), ("llama", "blockwise")])
def test_a_whole_model_is_one_graph_for_every_batch(name: str, recipe: str):
    eager = converted(FAMILIES[name].build(attn_implementation="eager", num_hidden_layers=1), recipe)
    compiled = copy.deepcopy(eager)
    batches = [FAMILIES[name].batch(rows) for rows in (2, 3, 5, 4, 7)]
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    losses = train(compiled, call, batches[:2])
    warm = counters["stats"]["unique_graphs"]
    losses += train(compiled, call, batches[2:])
    assert counters["stats"]["unique_graphs"] == warm, "the first size, then one graph for all others"
    assert same(losses, train(eager, eager, batches))
    assert same(list(compiled.parameters()), list(eager.parameters()))
    assert same(tables(compiled)[:2], tables(eager)[:2])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WAYS)
def test_a_fused_family_compiles_in_both_modes(name: str):
    """With gradients an autograd Function becomes a subgraph, without them its forward is inlined.

    GPT-2 within what one FP8 code in few moves: a graph lays its transposed weights out anew, and sums otherwise.
    """
    family, least = FAMILIES[name], 1e-2 if name == "gpt2" else 0.0
    one_layer = {key: 1 for key in DEPTHS if key in family.options}
    eager = converted(family.build(**one_layer), "current", fuse=True)
    eager.loss_type = eager.loss_type or "ForCausalLM"  # GPT-2's is guessed, with a warning that ends a graph
    for part in eager.modules():  # torch 2.11's Dynamo cannot copy the config that a cache is made from
        if hasattr(part, "config"):
            part.config.use_cache = False
    batch, plain = family.batch(2), copy.deepcopy(eager)
    compiled, found = torch.compile(plain, fullgraph=True, backend="aot_eager"), []
    for model, call in ((plain, compiled), (eager, eager)):
        with torch.no_grad():
            made = [logits(call(**batch))]
        loss = call(**batch).loss
        loss.backward()
        found.append([*made, loss.detach(), *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one - other).norm() <= least * other.norm()
