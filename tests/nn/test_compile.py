"""Graphs of layers of their own, in inference mode, CUDA graphs, and of equal blocks; else laws hold (tests/laws).

Equal blocks that are compiled one by one share graphs: nothing that differs from layer to layer is a constant of a
graph.  Dynamo's limit is 8 graphs a function; under fullgraph=True the ninth is an error, so that 9 blocks prove it.
"""

import copy
from typing import Any, cast

import pytest
import tiny_models as tiny
import torch
from blocks import net, train
from functorch.compile import make_boxed_func
from support import FP8_RECIPES, converted, same, state_of, tables
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import remove_unaligned_input_idxs

import fp8engine as fe
from fp8engine.scaling.sample import StepSamples

pytestmark = [
    pytest.mark.usefixtures("fresh"),
    # Dynamo reads .grad of a block's input, and torch warns of that.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:auto's decisions compile a function anew:fp8engine.errors.SamplingWarning"),
]


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:auto samples and decides between graphs:fp8engine.errors.SamplingWarning")
@pytest.mark.parametrize("recipe", ["delayed", fe.auto(interval=1)], ids=["delayed", "auto"])
def test_what_a_graphs_casts_write_is_no_copy_in_a_cuda_graph(recipe: Any):
    """CUDA graphs of torch.compile (mode "reduce-overhead") copy inputs that move, or begin at no multiple of 16 bytes.

    What an operator writes to a copy is lost: amaxes of weights and gradients were, on an H200.
    """
    model = net(recipe)
    state = state_of(model)
    given: list[torch.Tensor] = []
    graphs: list[bool] = []

    def inner(graph, inputs, static_input_idxs=(), **how) -> Any:
        """In place of Inductor's compiler: what it is told to leave where it is."""
        forward = graph.forward  # read now: Inductor takes the module apart
        places = list(graph.graph.find_nodes(op="placeholder"))
        written = {
            places.index(node.args[0])
            for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        }

        def run(*arguments):
            stay = set(remove_unaligned_input_idxs(arguments, static_input_idxs))
            ours = {i: x for i, x in enumerate(arguments) if isinstance(x, torch.Tensor) and storage(x) in own()}
            # Torch makes no CUDA graph of one that writes, as it is told, to an input that may move.
            assert ours.keys() <= stay or written - stay
            given.extend(ours.values())
            graphs.append(bool(written))
            return forward(*arguments)

        return make_boxed_func(run)

    def own() -> set[int]:
        tables = [state.live_2S, state.counts_CS, state.history_HS, state.rules_3S]
        if state.samples is not None:
            tables += [state.samples.slots_SL, state.samples.flat]
        return {storage(table) for table in tables}

    def storage(x: torch.Tensor) -> int:
        return x.untyped_storage().data_ptr()

    train(model, torch.compile(model, fullgraph=True, backend=lambda *given: compile_fx(*given, inner_compile=inner)))
    assert len({x.data_ptr() for x in given}) >= 6 * len(state.layers), "both tables of every slot are given"
    assert graphs == [True, False, False] * 5, "a step's graphs: update, forward, backward"


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_layer_of_its_own_begins_steps_in_its_graph_and_counts_what_is_shared_for_each(placement):
    """Two of them: the last norm behind a post-norm layer writes no codes for one whose step has not begun."""
    options: dict[str, Any] = {"recipe": "delayed", "norm": "rms", "placement": placement}
    eager = nn.Sequential(*(fe.TransformerLayer(32, 48, 4, "swiglu", **options) for _ in range(2)))
    compiled = copy.deepcopy(eager)
    in_graph = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for i in range(4):
        x = 3.0**i * torch.randn(2, 12, 32)
        for model, run in ((eager, eager), (compiled, compiled if i < 2 else in_graph)):  # told first who reads
            model.zero_grad()
            run(x).square().sum().backward()
        assert same([p.grad for p in eager.parameters()], [p.grad for p in compiled.parameters()])
        for one, other in zip(eager, compiled, strict=True):
            assert same(tables(one)[:2], tables(other)[:2])
    slots = [fe.scaling_state(compiled[1])[f"self_attn.{name}_proj.input"] for name in "qkv"]
    assert [(int(slot.calls), int(slot.elements)) for slot in slots] == [(4, 4 * 24 * 32)] * 3
    assert len({float(slot.history[0]) for slot in slots}) == 1


ALONE = {
    "LayerNormLinear": lambda: fe.LayerNormLinear(32, 16, bias=False, recipe="current", norm="rms"),
    "LayerNormMLP": lambda: fe.LayerNormMLP(32, 48, "swiglu", recipe="current"),
    "TransformerLayer": lambda: fe.TransformerLayer(32, 48, 4, recipe="current"),
}


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.parametrize("kind", ALONE)
def test_a_fused_layer_compiles_in_inference_mode(kind: str):
    layer, x = ALONE[kind](), torch.randn(2, 8, 32)
    with torch.inference_mode():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


BLOCKS, MOST = 9, 3  # graphs: one of sampled steps, one of others; one is to spare


class Block(nn.Module):
    """Two layers that read one input, and an MLP."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        x = x + self.q(x) + self.k(x)
        return x + self.down(torch.relu(self.up(x)))


def blocks(recipe: Any) -> Any:
    torch.manual_seed(0)
    return converted(nn.Sequential(*(Block() for _ in range(BLOCKS))), recipe)


def compiled_by_block(eager: nn.Module, blocks_of) -> nn.Module:
    compiled = copy.deepcopy(eager)
    for block in blocks_of(compiled):
        block.compile(backend="aot_eager", fullgraph=True)
    return compiled


def steps_alike(eager: Any, compiled: Any, loss, steps: int) -> None:
    """Losses, gradients and the scaling tables of both are equal, bit for bit, at every step."""
    for step in range(steps):
        found = []
        for model in (eager, compiled):
            made, parameters = loss(model, step), list(model.parameters())
            grads = torch.autograd.grad(made, parameters)
            found.append([made, *grads, *tables(model)[:2]])
            with torch.no_grad():
                for p, grad in zip(parameters, grads, strict=True):
                    p -= 0.01 * grad
        assert same(*found)
    assert counters["stats"]["unique_graphs"] <= MOST


def batch_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(torch.randn(16, 32, generator=torch.Generator().manual_seed(step))).square().mean()


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_equal_blocks_are_one_graph_and_compute_what_eager_code_computes(recipe: str):
    eager = blocks(recipe)
    steps_alike(eager, compiled_by_block(eager, lambda model: model), batch_loss, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_blocks_that_fully_shard_gathers_as_codes_are_one_graph(recipe: str, group):
    model: Any = blocks(recipe)
    fe.distributed.fsdp(model, blocks=list(model))
    assert fe.inspect(model).layers[0]["gather"] == "FP8 codes"
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    for step in range(2):
        batch_loss(model, step).backward()
    assert counters["stats"]["unique_graphs"] <= MOST


@pytest.mark.slow
def test_a_sampled_step_of_equal_blocks_is_one_graph_and_samples_what_eager_code_samples():
    eager = blocks(fe.auto(interval=2))
    compiled = compiled_by_block(eager, lambda model: model)
    steps_alike(eager, compiled, batch_loss, steps=1)
    samples, wanted = (cast(StepSamples, state_of(model).samples) for model in (compiled, eager))
    assert wanted.slots_SL.ne(0).any(1).view(-1, 4)[:, :3].all(), "every operand was described"
    assert torch.equal(samples.slots_SL, wanted.slots_SL)
    assert same(samples.parts, wanted.parts)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["auto", "current", pytest.param("delayed", marks=pytest.mark.slow)])
def test_fused_blocks_of_a_llama_are_one_graph(recipe: str):
    torch.manual_seed(0)
    eager = converted(tiny.llama(num_hidden_layers=BLOCKS, use_cache=False), recipe)
    compiled = compiled_by_block(eager, lambda model: model.model.layers)
    ids = tiny.tokens()
    # `auto` decides at its second step, and a decision compiles its layer again.
    steps_alike(eager, compiled, lambda model, _: tiny.loss_of(model, ids), steps=1 if recipe == "auto" else 2)
    assert fe.inspect(eager).layers[0]["fused"].startswith("fused: ")
