"""A watched step: nothing waits for the device, whatever is fed is seen or left out, ranks and graphs agree."""

import copy
import warnings
from typing import Any

import pytest
import torch
from autos import CALM, INTERVAL, batch, controller, decided, lines, loss_of, plain, train
from blocks import WIDTH
from op_counts import WAITS, Counted
from support import DTYPES, converted, state_of
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import Unsupported
from torch.nn.parallel import DistributedDataParallel

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.auto.schedule import sampled_step
from fp8engine.report.state import controllers_of
from fp8engine.scaling.histogram import LENGTH
from fp8engine.scaling.reads import layout_of

# torch 2.13's Dynamo looks at .grad of a block's input, which is no leaf.
NO_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def in_blocks(model: Any) -> Any:
    """Each block in one graph."""
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    return model


def test_a_watched_step_waits_no_more_than_one_that_is_not():
    found = {}
    for name, recipe in (("fixed", fe.current()), ("auto", fe.auto(interval=1))):
        model = plain(recipe)
        train(model, 3)
        state_of(model).begin_step()  # here the host reads what arrived on the host
        assert name == "fixed" or state_of(model).samples is not None
        with Counted(*WAITS) as waits:
            y = batch(9)
            for block in model.blocks:
                y = block(y)
            loss_of(y).backward()
        found[name] = waits.count
    assert found["auto"] == found["fixed"]


def test_observing_is_an_operator_with_a_fake():
    arguments = (torch.randn(8, 16), torch.zeros(1, LENGTH), torch.zeros(layout_of((4, 16), "input").length), 64)
    arguments = (*arguments, torch.zeros(64), 1, 1.0)
    torch.library.opcheck(torch.ops.fp8engine.observe.default, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_decides_nothing(bad: float):
    model = plain()

    def step(x: torch.Tensor) -> None:
        loss_of(model(x)).backward()
        model.zero_grad()

    for number in range(sampled_step(1, INTERVAL)):
        step(batch(number % 4))
    x = batch(6).detach()  # trouble, if it were heard
    x[3, 5] = bad
    step(x.requires_grad_())
    assert state_of(model).samples is not None, "step 7 is sampled"
    before = lines(model)
    for number in range(3):
        step(batch(number))
    assert lines(model) == before
    assert controller(model).history.samples["blocks.0.up.input"][1].nonfinite > 0
    assert all(m.numerics.recipe.is_fp8 for m in model.modules() if isinstance(m, fe.Linear))


def test_layers_that_are_frozen_skipped_or_never_run():
    model = plain()
    model.blocks[0].up.requires_grad_(False)
    with torch.no_grad():
        model.blocks[1].down.weight.zero_()
        model.blocks[1].down.bias.zero_()
    model.never = nn.Linear(3, 3)
    generator = torch.Generator().manual_seed(5)

    def skipping(x):
        x = model.blocks[0](x)
        return model.blocks[1](x) if torch.rand((), generator=generator) > 0.4 else x

    model.forward = skipping
    assert all(torch.tensor(train(model, 24)).isfinite())
    looks = controller(model).history.samples
    assert {"blocks.0.up.grad_output", "blocks.1.down.input", "blocks.1.gate.grad_output"} <= set(looks)
    assert 0 < len(looks["blocks.1.gate.input"]) < len(looks["blocks.0.gate.input"])
    assert model.blocks[1].up.numerics.recipe.grad_output.format == fe.E4M3  # not at step 0, whose gradient was 0


def test_a_layer_that_never_runs_keeps_its_recipe():
    model, inner = plain(), fe.revert(plain())
    unused = converted(nn.ModuleDict({"net": inner, "never": nn.Linear(8, 8)}), fe.auto(interval=INTERVAL))
    train(model, 6)
    train(unused, 6, unused["net"])
    assert unused["never"].numerics.recipe == fe.auto(interval=INTERVAL)
    assert [line.replace(" net.", " ") for line in lines(unused)] == lines(model)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 8, 8), (4, 0, 8), (4, 8, 1), (3, 129, 5), (1, 300, 2)], ids=str)
def test_any_shape_and_dtype_is_looked_at(shape, dtype):
    m, k, n = shape
    layer = fe.Linear(k, n, recipe=fe.auto(interval=1), dtype=dtype)
    for _ in range(4):
        x = torch.randn(m, k, dtype=dtype, requires_grad=True)
        layer(x).sum().backward()
    assert controllers_of(layer)[0].step == 3
    assert x.grad.shape == (m, k)  # pyright: ignore[reportOptionalMemberAccess]


def _on_rank(rank: int, ranks: int) -> dict[str, dict]:
    # Its own data, of which only that of the rank named here has trouble.
    found, seldom = {}, fe.auto(interval=32)
    cases = {"first": (0, None), "second": (1, None), "moved": (0, seldom), "moved elsewhere": (1, seldom)}
    for name, (troubled, recipe) in cases.items():
        model = plain(recipe)
        wrapped = DistributedDataParallel(model)
        losses = train(model, 14, lambda x: wrapped(x if rank == troubled else batch(0)))  # noqa: B023 - called here
        sampled = {each.step for seen in controller(model).history.samples.values() for each in seen}
        found[name] = {"lines": lines(model), "losses": losses, "sampled": sorted(sampled)}
    return found


@pytest.mark.slow
def test_ranks_that_see_different_data_decide_alike():
    one, other = run(_on_rank, 2, fresh=True)
    assert one["first"]["losses"] != other["first"]["losses"]
    for name in ("first", "second"):
        assert one[name]["lines"] == other[name]["lines"] != []
    # On CPUs the copies are there at once: the step after a sample decides, as in one process.
    assert one["first"]["lines"][0].startswith("step 1 ")
    # Trouble begins at step 5: the look at step 8 meets it in the amaxes of step 7, if it is the first rank's.
    assert one["moved"]["sampled"] == other["moved"]["sampled"] == [0, 8]
    assert one["moved elsewhere"]["sampled"] == other["moved elsewhere"]["sampled"] == [0]
    assert one["moved"]["lines"] == other["moved"]["lines"]
    assert any(line.startswith("step 9 ") for line in one["moved"]["lines"])
    # The first rank's numbers count.
    trouble = lambda lines: [line for line in lines if ".up.input " in line and "forward, " in line]  # noqa: E731
    assert trouble(one["first"]["lines"])
    assert not trouble(one["second"]["lines"])


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("before", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_one_graph_of_the_whole_model_keeps_its_formats_and_says_so(before: int):
    model, eager = plain(), plain() if before else plain("current")
    train(model, before)
    train(eager, before)
    decided = lines(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.warns(fe.errors.SamplingWarning, match="fullgraph=True makes one of the whole model"):
        assert train(model, 5, compiled, start=before) == train(eager, 5, start=before)
    assert lines(model) == decided
    assert bool(decided) == bool(before)
    assert state_of(model).samples is None


@pytest.mark.usefixtures("fresh")
def test_one_graph_of_the_whole_model_is_an_error_under_strict():
    model = plain()
    controllers_of(model)[0].failures.strict = True
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(Unsupported, match="strict=True: auto samples and decides between graphs"):
        compiled(batch(CALM))


@NO_LEAF
@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("how", ["wrapped", "inside another module", "forward alone"])
def test_a_model_compiled_whole_is_seen_and_changes(how: str):
    model, eager = plain(), plain()
    run = model
    if how == "forward alone":
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    else:
        run = torch.compile(model if how == "wrapped" else nn.Sequential(nn.Identity(), model), backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=64), warnings.catch_warnings():
        warnings.simplefilter("error", fe.errors.SamplingWarning)
        assert train(model, 12, run) == train(eager, 12)
    assert lines(model) == lines(eager)
    assert len(lines(model)) > 6


@pytest.mark.slow
@NO_LEAF
@pytest.mark.usefixtures("fresh")
def test_a_model_compiled_whole_with_recognised_norms_changes():
    torch.manual_seed(0)
    layers = [[nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)] for _ in range(2)]
    made = nn.Sequential(*(nn.Sequential(*block) for block in layers))
    eager, model = (converted(copy.deepcopy(made), fe.auto(interval=4)) for _ in range(2))
    for call in (eager, torch.compile(model, backend="aot_eager")):
        for step in range(12):
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
            (call(x) - x).square().mean().backward()
            (eager if call is eager else model).zero_grad()
    assert lines(model) == lines(eager) != []


@pytest.mark.slow
@NO_LEAF
@pytest.mark.usefixtures("fresh")
def test_an_evaluation_of_a_model_compiled_whole_changes_nothing():
    model, eager = plain(), plain()
    run = torch.compile(model, backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=64):
        for start in range(6):
            with torch.no_grad():
                assert torch.equal(run(batch(CALM)), eager(batch(CALM)))
            assert train(model, start + 1, run, start=start) == train(eager, start + 1, start=start)
    assert lines(model) == lines(eager) != []


@NO_LEAF
@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_decisions_end_before_a_model_compiled_whole_is_out_of_graphs():
    # Two graphs before any decision and two of each: of 4 they allow one, and the model's forward stays compiled.
    model, eager, graphs = plain(), plain(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    run = torch.compile(model, backend=backend)
    with torch._dynamo.config.patch(recompile_limit=4), pytest.warns(fe.errors.SamplingWarning, match="formats stay"):
        train(model, 18, run)
    train(eager, 18)
    assert decided(model) == decided(eager)[:1]
    assert len(decided(eager)) > 1
    assert len(graphs) <= 4
    train(model, 30, start=18)
    assert len(decided(model)) > 1, "in eager code it decides again"


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@NO_LEAF
def test_blocks_compiled_one_by_one_are_seen_and_change():
    eager, regional = plain(), in_blocks(plain())
    with torch._dynamo.config.patch(recompile_limit=64):  # a graph for each set of formats that a block has had
        assert train(regional, 1) == train(eager, 1)
        assert all(torch.tensor(train(regional, 12, start=1)).isfinite())
    train(eager, 12, start=1)
    change = "grad_output E5M2/tensor -> E4M3/"
    of = lambda model: {" ".join(line.split()[:3]) for line in lines(model) if change in line}  # noqa: E731
    assert of(regional) == of(eager)
    assert len(of(eager)) == 6
    assert lines(regional)[0].startswith("step 1 ")
    assert all(m.numerics.recipe.grad_output.format == fe.E4M3 for m in regional.modules() if isinstance(m, fe.Linear))


@NO_LEAF
@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("strict", [False, True])
def test_blocks_that_may_have_few_graphs_only_are_told_once_before_they_run(strict: bool):
    model = in_blocks(plain())
    controllers_of(model)[0].failures.strict = strict
    words = r"FailOnRecompileLimitHit\) after torch._dynamo.config.recompile_limit graphs, which is 8: set it to 64"
    if strict:
        with pytest.raises(Unsupported, match=words):
            train(model, 1)
        return
    with pytest.warns(fe.errors.SamplingWarning, match=words) as found:
        train(model, 2)
    assert len(found) == 1
    with torch.no_grad():
        assert model(batch(CALM)).isfinite().all()


def test_the_copy_of_a_watched_model_looks_for_itself():
    model = plain()
    train(model, sampled_step(1, INTERVAL))
    model(batch(CALM))  # sampled, under way
    other = copy.deepcopy(model)
    assert state_of(other).samples is not state_of(model).samples
    assert state_of(other).samples is not None
    assert (WIDTH, controller(other).step) == (64, 7)
