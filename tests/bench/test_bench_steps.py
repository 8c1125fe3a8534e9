"""Blocks and models measured: what is checked, what is saved, and that a wrong variant gets no time."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama as llama

from benchmarks import graphs, networks
from fp8engine.bench import linear, models, steps
from fp8engine.bench.harness import Timer, line
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


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_models_run(name: str):
    names = ("bf16", "fp8engine current", "layer current")
    ways = {key: way for key, way in networks.variants(CPU, False).items() if key in names}
    rows = measured(ways, networks.case(name, SMALL, 16, 8))
    assert all(row["correct"] for row in rows.values()), rows
    assert rows["fp8engine current"]["sqnr"][0] < rows["bf16"]["sqnr"][0], "FP8 was really used"


@pytest.mark.parametrize("case", models.cases(CPU), ids=str)
def test_the_models_of_transformers_run(case: steps.Case):
    """Those of `fp8engine bench model`; their layers are what torch.compile takes one by one."""
    ways = {"bf16": steps.Variant(steps.bf16), "fp8engine current": steps.Variant(steps.converted("current"))}
    rows = measured(ways, case)
    assert all(row["correct"] for row in rows.values()), rows
    made: Any = case.make()
    assert len(made.blocks) == models.SIZES["cpu"][4]
    assert rows["bf16"]["tokens"] == 128
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
    """A fake graph: what was written when it was captured stays."""
    monkeypatch.setattr(graphs, "captured", lambda step, where: (SimpleNamespace(replay=lambda: None), step(0)))
    rows = measured({"bf16": steps.Variant(steps.bf16), "replayed": steps.Variant(steps.bf16, graphs.whole)})
    assert rows["replayed"]["correct"] is True
    assert rows["replayed"]["sqnr"] == rows["bf16"]["sqnr"]
    assert rows["bf16"]["activations"] > 0
    assert "activations" not in rows["replayed"]
    assert "saved" not in line(rows["replayed"])


def test_a_step_begins_without_the_gradients_of_the_one_before():
    layer, x = nn.Linear(4, 2), torch.ones(3, 4, requires_grad=True)
    _, step = steps.eager(layer, [(x, torch.ones(3, 2)), (2 * torch.ones(3, 4), torch.ones(3, 2))])
    assert torch.equal(step(0), layer(x))
    step(1)
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[6.0] * 4] * 2
    step(2)
    assert layer.weight.grad.tolist() == [[3.0] * 4] * 2
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3, 2) @ layer.weight)


class Halved(nn.Module):
    """The right gradient's direction, and half the output."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x) / 2


def shifted(network: Any) -> nn.Module:
    """The right output, and a gradient that is not."""
    network.self_attn.q_proj.weight.register_hook(lambda grad: grad.roll(1, 0))
    return network


def test_a_wrong_variant_has_no_time():
    makes = {"bf16": steps.bf16, "halved": Halved, "shifted": shifted}
    rows = measured({name: steps.Variant(make) for name, make in makes.items()})
    assert [row["correct"] for row in rows.values()] == [True, False, False]
    assert [name for name, row in rows.items() if "seconds" in row] == ["bf16"]
    assert "WRONG" in line(rows["halved"])


def test_bytes_saved_are_counted_once_and_without_parameters():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return (x @ self.weight) * (x @ self.weight) + x.exp()

    network, x = Twice(), torch.randn(4, 8, requires_grad=True)
    # x for two products (one storage), both products, exp's result: four of 4 x 8 FP32.
    assert steps.saved_bytes(network, lambda: network(x)) == 4 * 4 * 8 * 4


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
