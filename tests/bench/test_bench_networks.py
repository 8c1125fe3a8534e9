"""Blocks, models, generation, experts and graphs measured without a card: a wrong variant gets no time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama as llama

from benchmarks import experts, generate, graphs, networks, peers
from benchmarks.networks import NETWORKS, Size
from benchmarks.peers import Graph
from fp8engine.bench import linear, models, steps
from fp8engine.bench.cases import Shape, sqnr
from fp8engine.bench.harness import Limits, Timer, line
from fp8engine.bench.timing import WallClock

CPU = torch.device("cpu")
SMALL = networks.Size(32, 64, 4, 2, 1, 48)


def measured(ways: dict, case: steps.Case | None = None) -> dict[str, dict]:
    found = steps.steps([case or networks.case("block", SMALL, 16, 8)], CPU, ways, Timer(WallClock(), 2))
    return {row["name"]: row for row in found["rows"]}


def test_every_variant_of_a_block_is_right_and_has_its_ratio():
    rows = measured(networks.variants(CPU, in_graphs=False))
    layers = [f"layer current{label}" for label in ("", ", recompute", ", FP8 inputs")]
    assert set(rows) == {"bf16", "fp16 autocast", *(f"fp8engine {recipe}" for recipe in steps.RECIPES), *layers}
    assert all(row["correct"] for row in rows.values())
    base = rows["bf16"]["seconds"]
    for row in rows.values():
        assert row["over_bf16"] == pytest.approx(base / row["seconds"])
        assert row["tokens_per_s"] == pytest.approx(16 / row["seconds"])
        assert row["target"] is None, "a target belongs to a card"
    kept = [rows[name]["activations"] for name in ("bf16", "fp8engine current", *layers)]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 5


CASES = [networks.case(name, SMALL, 16, 8) for name in ("llama", "bert", "vit")]


@pytest.mark.parametrize("case", CASES + models.cases(CPU), ids=str)
def test_models_and_those_of_transformers_run(case: steps.Case):
    ways = {name: way for name, way in networks.variants(CPU, False).items() if name in ("bf16", "fp8engine current")}
    if case in CASES:
        ways["layer current"] = networks.variants(CPU, False)["layer current"]
    else:
        made: Any = case.make()
        assert (len(made.blocks), case.about["tokens"]) == (models.SIZES["cpu"][4], 128)
    rows = measured(ways, case)
    assert all(row["correct"] for row in rows.values()), rows
    assert rows["fp8engine current"]["sqnr"][0] < rows["bf16"]["sqnr"][0], "FP8 was really used"


def test_compiled_variants_are_the_eager_ones_and_torchaos_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    ours = [f"fp8engine {recipe}, compiled" for recipe in steps.RECIPES]
    of_steps, of_linear = networks.variants(CPU, True), linear.variants(CPU, True)
    in_graphs = [name for name, way in of_steps.items() if way.run is steps.compiled]
    assert in_graphs == [steps.COMPILED, *ours, "layer current, compiled"]
    assert [name for name, way in of_linear.items() if way.run is steps.compiled] == ["bf16 nn.Linear, compiled", *ours]
    assert of_steps[steps.COMPILED].make is of_steps[steps.BASE].make
    assert of_linear[ours[0]].make is of_linear["fp8engine current"].make
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert list(steps.as_graphs({}, torch.device("cuda"))) == ["torchao tensorwise, compiled"]


def test_a_replayed_step_is_checked_like_any_other_and_saves_nothing_anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs, "captured", lambda step, where: (SimpleNamespace(replay=lambda: None), step(0)))
    rows = measured({"bf16": steps.Variant(steps.bf16), "replayed": steps.Variant(steps.bf16, graphs.whole)})
    replayed, eager = rows["replayed"], rows["bf16"]
    assert (replayed["correct"], replayed["sqnr"]) == (True, eager["sqnr"])
    assert ("activations" in replayed, "saved" in line(replayed), eager["activations"] > 0) == (False, False, True)


def test_a_step_begins_without_the_gradients_of_the_one_before():
    layer, x = nn.Linear(4, 2), torch.ones(3, 4, requires_grad=True)
    _, step = steps.eager(layer, [(x, torch.ones(3, 2)), (2 * torch.ones(3, 4), torch.ones(3, 2))])
    assert torch.equal(step(0), layer(x))
    for turn, gradient in ((1, 6.0), (2, 3.0)):
        step(turn)
        assert layer.weight.grad is not None
        assert layer.weight.grad.tolist() == [[gradient] * 4] * 2
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3, 2) @ layer.weight)


def halved(network: Any) -> Any:
    """The right gradient's direction, and half the output."""
    network.register_forward_hook(lambda module, inputs, y: y / 2)
    return network


def shifted(network: Any) -> nn.Module:
    """The right output, and a gradient that is not."""
    network.self_attn.q_proj.weight.register_hook(lambda grad: grad.roll(1, 0))
    return network


def test_a_wrong_variant_has_no_time():
    rows = measured({make.__name__: steps.Variant(make) for make in (steps.bf16, halved, shifted)})
    assert {name: (row["correct"], "seconds" in row) for name, row in rows.items()} == {
        "bf16": (True, True), "halved": (False, False), "shifted": (False, False),
    }  # fmt: skip
    assert "WRONG" in line(rows["halved"])


def test_bytes_saved_are_counted_once_and_without_parameters():
    network, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8, requires_grad=True)
    saved = steps.saved_bytes(network, lambda: network(x) * network(x) + x.exp())
    # x for two products (one storage), both products, exp's result: four of 4 x 8 FP32.
    assert saved == 4 * 4 * 8 * 4


def test_the_plain_block_is_llamas():
    size: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 8}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "attn_implementation": "sdpa"}
    config = llama.LlamaConfig(**size)
    theirs = llama.LlamaDecoderLayer(config, 0)
    ours = networks.Block(SMALL)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 8, 32)
    rope = llama.LlamaRotaryEmbedding(config)(x, torch.arange(8)[None])
    wanted = theirs(x, position_embeddings=rope, attention_mask=torch.full((8, 8), -torch.inf).triu(1)[None, None])
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    assert torch.allclose(ours(x), wanted, rtol=0, atol=1e-5)  # FP32, sums of up to 64 terms, three matmuls deep


TIMER = Timer(WallClock(), 2)


@pytest.mark.parametrize("done", [False, True])
def test_the_host_is_timed_while_the_card_is_busy(done: bool):
    """Nothing else can tell the host's time from the card's.  done: whether the card was done first."""
    calls = []
    event = SimpleNamespace(record=lambda: calls.append("record"), query=lambda: (calls.append("query"), done)[1])
    card: Any = SimpleNamespace(
        Event=lambda: event, _sleep=lambda cycles: calls.append("sleep"), synchronize=lambda where: calls.append("wait")
    )
    x: Any = SimpleNamespace(device=torch.device("cuda", 0))
    found = linear.host_us(lambda x: calls.append("forward"), x, card)
    assert calls == ["wait", "sleep", "record", *["forward"] * linear.HOST_CALLS, "query", "wait"]
    assert (found is None) == done


@pytest.mark.parametrize("recipe", [None, "current", "blockwise"])
def test_without_a_card_the_host_is_timed_and_there_is_no_graph(recipe: str | None):
    eager, graph = peers.graphs(Graph(Shape(8, 16, 32), recipe), CPU, TIMER)
    assert (eager["correct"], eager["host_us"] > 0) == (True, True)
    assert (graph["correct"], "seconds" in graph) == (None, False)
    assert "host" in line(eager)
    assert "8x16x32 cannot run: " in " ".join(line(graph).split())


@pytest.mark.parametrize("wrong", [False, True])
def test_a_graph_is_timed_where_it_computes_what_eager_code_does(monkeypatch: pytest.MonkeyPatch, wrong: bool):
    def capture(step, where):
        return SimpleNamespace(replay=lambda: None), tuple(part.clone() * (-1 if wrong else 1) for part in step(0))

    monkeypatch.setattr(graphs, "captured", capture)
    _, graph = peers.graphs(Graph(Shape(8, 16, 32), "current"), CPU, TIMER)
    assert graph["correct"] is ("over_eager" in graph) is not wrong


CASTS = {
    "right": lambda codes: codes,
    "another code": lambda codes: codes.view(torch.uint8).bitwise_xor(1).view(torch.float8_e4m3fn),
    "of nothing": torch.zeros_like,
}


@pytest.mark.parametrize("which", CASTS)
def test_inductors_casts_are_checked(monkeypatch: pytest.MonkeyPatch, which: str):
    monkeypatch.setattr(torch, "compile", lambda cast, fullgraph: lambda x: CASTS[which](cast(x)))
    ours, given, own = peers.inductor_casts((64, 96), CPU, TIMER, Limits(1e9, 1e9))
    assert ours["correct"]
    assert given["correct"] is ("of_copy" in given) is own["correct"] is (which == "right")


CASE = generate.Case(Size(32, 64, 4, 2, 2, 64), 2, 5, 4)


def model() -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS["llama"](CASE.size).eval()


def test_read_piece_by_piece_is_read_at_once():
    """FP32, summed in another order: 2^-24 a sum of 64, some 120 dB; a wrong position or mask leaves under 20."""
    net, text = model(), torch.randint(64, (2, 9))
    with torch.inference_mode():
        assert sqnr(generate.piecewise(net, text, 5), net(text)) > 100


def test_each_token_is_the_most_likely_after_those_before():
    net, prompt = model(), torch.randint(64, (2, 5))
    text = prompt
    for _ in range(4):
        with torch.inference_mode():
            text = torch.cat([text, net(text)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(generate.write(net, prompt, 4), text[:, 5:])


def test_a_right_variant_is_timed_and_a_wrong_one_is_not():
    rows = generate.generate([CASE], CPU, timer=Timer(WallClock(), 1))["rows"]
    assert [(row["name"], row["correct"]) for row in rows] == [(name, True) for name in generate.variants()]
    by_name = {row["name"]: row for row in rows}
    assert by_name["served current"]["weights"] < 0.75 * by_name["bf16"]["weights"]  # all but the head in a byte
    assert all(row["tokens_per_s"] == pytest.approx(2 * 4 / row["seconds"]) for row in rows)
    assert "x bf16" in line(rows[1])

    def broken(net: Any) -> nn.Module:
        with torch.no_grad():
            net.blocks[0].mlp.down_proj.weight.mul_(-1)
        return net

    ways = {"bf16": lambda net: net, "broken": broken}
    right, wrong = generate.generate([CASE], CPU, ways, Timer(WallClock(), 1))["rows"]
    assert ("seconds" in right, "seconds" in wrong) == (True, False)
    assert "WRONG" in line(wrong)


def test_every_way_to_multiply_experts_is_right_or_says_why():
    case = experts.Case(64, 40, 48, 32, 4)
    assert case.sizes() == [40, 8, 8, 8]
    rows = {row["name"]: row for row in experts.compare(case, CPU, Timer.of(CPU, 1, 1))}
    assert len(rows) == 7
    for name, row in rows.items():
        if "ours" in name:
            assert "no Triton kernels for cpu" in row["why"]
        else:
            assert row["correct"], name
            assert "x bf16" in line(row)
    for case in experts.CASES:
        assert (sum(case.sizes()), len(case.sizes()), min(case.sizes()) >= 0) == (case.rows, case.experts, True)
