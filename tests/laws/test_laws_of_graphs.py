"""Laws of torch.compile: a graph computes, records and decides what eager code does, bit for bit, in few graphs.

Each row of scenarios.py is compiled under two recipes, others for its neighbour: as it is, and inside a checkpoint,
whose graph holds the forward twice.  `make nightly` compiles each row under every recipe both ways.  Inductor, which
sums in another order, compiles one row of a kind.
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


def checkpointed(model: Any) -> Any:
    """The model, whose forward runs again in backward."""
    forward = model.forward
    model.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    return model


@pytest.mark.few(8)
@pytest.mark.parametrize(("row", "recipe"), cases("compiled", "checkpoint in a graph", checkpointed=True))
def test_a_checkpoint_in_a_graph_changes_nothing(row: Scenario, recipe: str):
    eager, compiled = (row.build(RECIPES[recipe]) for _ in range(2))
    call = torch.compile(checkpointed(compiled), fullgraph=True, backend="aot_eager")
    assert differences(trained(compiled, call=call), trained(eager), but=COUNTS) == []


INDUCTOR = [
    ("two blocks", "delayed", False),
    ("two blocks", "blockwise", True),
    ("layer norm and mlp, recomputed", "current", False),
    ("transformer", "current", False),
    ("experts", "rowwise", False),
]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "recipe", "recomputed"), INDUCTOR)
def test_inductor_agrees(name: str, recipe: str, recomputed: bool):
    """But for the order of sums: an ulp of FP32 moves few elements one FP8 step, 2^-3 of themselves at most."""
    (row,) = (row for row in TABLE if row.name == name)
    eager, compiled = (row.build(RECIPES[recipe]) for _ in range(2))
    call = torch.compile(checkpointed(compiled) if recomputed else compiled, fullgraph=True)
    wanted, found = trained(eager, range(2)), trained(compiled, range(2), call)
    for what in (what for what in wanted if what.startswith(("loss", "gradient", "history"))):
        assert (found[what] - wanted[what]).norm() <= 3e-2 * wanted[what].norm(), what
    counted = [what for what in wanted if what.startswith("count of calls")]
    assert all(torch.equal(found[what] > 0, wanted[what] > 0) for what in counted)
