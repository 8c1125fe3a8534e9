"""Graphs of a plain model, of layers of their own, in inference mode, and CUDA graphs; else laws hold (tests/laws)."""

import copy
from typing import Any

import pytest
import torch
from blocks import Net, net, train
from functorch.compile import make_boxed_func
from support import same, state_of, tables
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import remove_unaligned_input_idxs

import fp8engine as fe

pytestmark = pytest.mark.usefixtures("fresh")


def test_a_plain_model_compiles_into_one_graph_less():
    """What the laws' count of graphs is made of: without FP8 there is no update."""
    model = Net()
    train(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert counters["stats"]["unique_graphs"] == 1


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
