"""Laws of torch.compile: a graph computes, records and decides what eager code does, bit for bit, in few graphs.

Each row of scenarios.py is compiled under two recipes, others for its neighbour: as it is, and inside a checkpoint,
whose graph holds the forward twice.  `make nightly` compiles each row under every recipe both ways.
"""

from typing import Any

import pytest
import torch
from scenarios import TABLE, Scenario
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from trials import COUNTS, RECIPES, differences, states, tables, trained

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    # torch 2.13's Dynamo looks at .grad of a graph's input, which is no leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
ROWS = (2, 2, 3, 4)  # of each step's batch
QUICK = 4  # of so many rows one is compiled in the short part
FIXED = [name for name in RECIPES if name != "auto"]  # it compiles a layer again for each decision


def cases(*laws: str, checkpointed: bool) -> list:
    """Rows and recipes, marked by the part of the tests that has them."""
    found = []
    for i, row in enumerate(TABLE):
        for j, recipe in enumerate(FIXED):
            if not {*laws, f"recipe {recipe}"} & set(row.excludes):
                turn = (j - 3 * i) % len(FIXED)
                marks = pytest.mark.slow if turn == (3 if checkpointed else 0) else pytest.mark.nightly
                if i == QUICK * j and j < 2:
                    marks = ()
                found.append(pytest.param(row, recipe, marks=marks, id=f"{row.name}, {recipe}"))
    return found


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(8)
@pytest.mark.parametrize(("row", "recipe"), cases("compiled", checkpointed=False))
def test_a_whole_graph_computes_what_eager_code_computes(row: Scenario, recipe: str):
    eager, compiled = (row.build(RECIPES[recipe]) for _ in range(2))
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    wanted = trained(eager, rows=ROWS)
    assert differences(trained(compiled, call=call, rows=ROWS), wanted, but=COUNTS) == []
    # The update of each scaling state, the first size of a batch, and one graph for every other.
    assert counters["stats"]["unique_graphs"] <= 2 + len(states(eager))
    _evaluates_alike(eager, compiled, call)


def _evaluates_alike(eager: Any, compiled: Any, call: Any) -> None:
    """Without gradients too, where nothing is recorded."""
    before, x = tables(compiled), torch.randn(2, 12, 32)
    with torch.no_grad():
        assert torch.equal(call(x), eager(x))
    assert differences(tables(compiled), before, but=COUNTS) == []


@pytest.mark.few(8)
@pytest.mark.parametrize(("row", "recipe"), cases("compiled", "checkpoint in a graph", checkpointed=True))
def test_a_checkpoint_in_a_graph_changes_nothing(row: Scenario, recipe: str):
    eager, compiled = (row.build(RECIPES[recipe]) for _ in range(2))
    forward = compiled.forward
    compiled.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    assert differences(trained(compiled, call=call), trained(eager), but=COUNTS) == []
