"""torch.compile of converted transformers: one graph, eager's results, no new graph for another batch.

Sizes are symbols in the second graph.  A recipe meets them in one of three ways: an update of scales before the forward
(delayed), a scale for each of a number of rows (rowwise), rows rounded up to blocks (blockwise).  The other recipes,
and all of them with sizes that change, are compiled in tests/nn/test_compile.py.
"""

import copy
from typing import Any

import pytest
import torch
from hf_families import FAMILIES
from support import converted, same, tables
from torch._dynamo.utils import counters

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

CASES = [("llama", "delayed"), ("bert", "rowwise"), ("llama", "blockwise")]


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


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "recipe"), CASES)
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
