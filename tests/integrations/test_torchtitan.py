"""torchtitan's debug Llama in FP8 on two gloo ranks, FSDP2 and selective checkpointing: `make titan` runs this file."""

import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import cpu_titan
import pytest
import torch

from benchmarks.distributed.processes import run

pytest.importorskip("torchtitan", reason="torchtitan is not installed; make titan")
pytestmark = pytest.mark.slow
BASELINE = "none"


def work(rank: int, ranks: int, folder: Path) -> dict:
    """Losses and what is left of each run: the baseline, recipes, FP8 gather, and delayed resumed after step 2."""
    warnings.simplefilter("ignore")
    cpu_titan.prepare(rank, ranks)
    os.chdir(folder)
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from fp8engine.integrations.torchtitan import Float8Converter, with_fp8

    def trained(recipe, options="", name=None, **converter):
        config = llama3_debugmodel()
        if recipe != BASELINE:
            config = with_fp8(config, Float8Converter.Config(recipe=recipe, **converter))
        options = f"--training.steps {cpu_titan.STEPS} {options}"
        return cpu_titan.train(config, options, folder / (name or recipe), seen)

    save = "--checkpoint.enable --checkpoint.interval 2"
    found = {recipe: trained(recipe) for recipe in (BASELINE, "rowwise")}
    found["gathered"] = trained("delayed", name="gathered", fp8_gather=True)
    found["delayed"] = trained("delayed", save)
    if rank == 0:
        step = "checkpoint/step-2"
        shutil.copytree(folder / "delayed" / step, folder / "resumed" / step)
    torch.distributed.barrier()
    found["resumed"] = trained("delayed", save, "resumed")
    return found


def seen(model) -> dict:
    """Of a trained model: its keys, its weights' bits, and the report and scaling states of its FP8 layers."""
    import fp8engine as fe
    from fp8engine.nn.linear import float8_modules

    shards = {name: p.to_local().detach().clone() for name, p in model.named_parameters()}
    layers = float8_modules(model)
    found = {"keys": list(model.state_dict()), "shards": shards, "states": len({id(x.numerics.state) for x in layers})}
    if layers:
        found["report"] = fe.inspect(model).to_dict()
        found["scales"] = {name: slot.scale for name, slot in fe.scaling_state(model).items()}
        found["history"] = {name: slot.history for name, slot in fe.scaling_state(model).items()}
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("titan")
    cpu_titan.assets(folder)
    return run(work, 2, folder)


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_losses_are_within_half_a_percent_of_the_baseline(runs, recipe):
    baseline, fp8 = runs[0][BASELINE]["losses"], runs[0][recipe]["losses"]
    assert list(fp8) == list(baseline) == [1, 2, 3, 4]
    assert baseline[4] < 0.9 * baseline[1], "the debug model learns"
    for step, loss in fp8.items():
        assert loss != baseline[step], "FP8 rounds"
        assert abs(loss - baseline[step]) < 0.005 * baseline[step]


def test_layers_have_torchtitans_names_and_one_scaling_state(runs):
    baseline, fp8 = runs[0][BASELINE]["seen"], runs[0]["rowwise"]["seen"]
    assert fp8["keys"] == baseline["keys"]
    assert fp8["states"] == 1
    layers = {layer["name"]: layer for layer in fp8["report"]["layers"]}
    inside = ("attention.qkv_linear.wqkv", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    converted = {name for name, layer in layers.items() if layer["recipe"] == "rowwise"}
    assert converted == {f"layers.{block}.{part}" for block in range(6) for part in inside}
    assert set(layers) - converted == {"lm_head"}
    assert layers["lm_head"]["reason"].startswith("output head")
    assert all(layers[name]["ran"] and layers[name]["grad_output"]["calls"] == 4 for name in converted)


def test_fp8_gather_changes_no_bit(runs):
    """Per tensor: one code of a weight serves forward and dgrad.  Rowwise casts dgrad's columns from the row codes."""
    for rank in runs:
        plain, gathered = rank["delayed"], rank["gathered"]
        assert gathered["losses"] == plain["losses"]
        for name, shard in plain["seen"]["shards"].items():
            assert torch.equal(shard, gathered["seen"]["shards"][name]), name
        told = {layer["gather"] for layer in gathered["seen"]["report"]["layers"] if layer["recipe"] == "delayed"}
        assert told == {"FP8 codes"}
        sums = gathered["seen"]["report"]["totals"]["gather"]
        assert sums["as_codes"] == 30


def test_ranks_predict_the_same_scales(runs):
    """Amaxes are joined at the start of a step, so the histories agree; those of the last step are each rank's."""
    (one, other) = (rank["delayed"]["seen"] for rank in runs)
    assert len(one["history"]) == 90
    for name, history in one["history"].items():
        assert torch.equal(history, other["history"][name]), name
        assert (history[:3] > 0).all(), name


def test_a_run_resumed_from_its_checkpoint_is_the_run_that_went_on(runs):
    """Bit for bit: losses, weights, histories.  Without the scaling state step 3 would begin with current scaling."""
    for rank in runs:
        whole, resumed = rank["delayed"], rank["resumed"]
        assert resumed["losses"] == {step: whole["losses"][step] for step in (3, 4)}
        for name, shard in whole["seen"]["shards"].items():
            assert torch.equal(shard, resumed["seen"]["shards"][name]), name
        for name, history in whole["seen"]["history"].items():
            assert torch.equal(history, resumed["seen"]["history"][name]), name


@pytest.fixture
def debug_model():
    """A function that returns the config tree of the debug Llama, converted with some options."""
    from torchtitan.models.llama3 import model_registry

    from fp8engine.integrations.torchtitan import Float8Converter

    def made(**options):
        return model_registry("debugmodel", converters=[Float8Converter.Config(**options)]).model

    return made


def test_patterns_choose_layers_and_recipes(debug_model):
    import fp8engine as fe

    overrides = {"layers.0.*": "bf16", "layers.0.feed_forward.w2": "blockwise", "lm_head": fe.delayed(history=4)}
    tree = debug_model(recipe="current", filter_fqns=["attention"], overrides=overrides)
    with torch.device("meta"):
        model = tree.build()
    layers = {layer["name"]: (layer["recipe"], layer["reason"]) for layer in fe.inspect(model).to_dict()["layers"]}
    assert layers["layers.1.attention.wo"] == ("none", "filter_fqns: attention")
    assert layers["layers.0.feed_forward.w1"] == ("none", "overrides: bf16")
    assert layers["layers.0.feed_forward.w2"][0] == "blockwise"
    assert layers["layers.1.feed_forward.w1"][0] == "current"
    assert model.lm_head.numerics.recipe.history == 4


def test_models_of_one_config_have_states_of_their_own(debug_model):
    tree = debug_model()
    with torch.device("meta"):
        one, other = tree.build(), tree.build()
    assert one.layers["0"].attention.wo.numerics.state is one.layers["5"].attention.wo.numerics.state
    assert one.layers["0"].attention.wo.numerics.state is not other.layers["0"].attention.wo.numerics.state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "rowise"}, "unknown recipe 'rowise'; did you mean 'rowwise'"),
        ({"filter_fqns": ["atention"]}, r"unknown filter_fqns entry .* 'atention'"),
        (
            {"overrides": {"*.w4": "bf16"}},
            r"unknown overrides pattern .* '\*.w4'; did you mean 'layers\.0\..* 31 are known",
        ),
        ({"filter_fqns": ["layers"]}, "nothing to convert in Llama3Model.Config: .*wqkv: filter_fqns: layers"),
    ],
)
def test_bad_options(debug_model, options, message):
    with pytest.raises(ValueError, match=message):
        debug_model(**options)


def test_a_tree_is_converted_once(debug_model):
    from fp8engine.errors import ConversionError
    from fp8engine.integrations.torchtitan import Float8Converter

    with pytest.raises(ConversionError, match=r"nothing to convert .*wqkv: converted already"):
        Float8Converter.Config().build().convert(debug_model())


def test_strict_refuses_a_subclass_with_code_of_its_own(debug_model):
    from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
    from torchtitan.models.llama3 import model_registry

    from fp8engine.errors import StrictError
    from fp8engine.integrations.torchtitan import Float8Converter

    tree = model_registry("debugmodel").model
    tree.layers[2].attention.wo = ScaledBiasRowwiseLinear.Config(in_features=256, out_features=256)
    with pytest.raises(StrictError, match=r"layers\.2\.attention\.wo cannot .* ScaledBiasRowwiseLinear"):
        Float8Converter.Config(strict=True).build().convert(tree)


@pytest.mark.parametrize("strict", [True, False])
def test_strict_reaches_the_gather(strict: bool, monkeypatch: pytest.MonkeyPatch):
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from fp8engine.integrations import torchtitan

    told = []
    monkeypatch.setattr(torchtitan, "gather_fp8", lambda model, *, strict: told.append(strict) or model)
    options = torchtitan.Float8Converter.Config(fp8_gather=True, strict=strict)
    spec = torchtitan.with_fp8(llama3_debugmodel(), options).model_spec
    model = torch.nn.Linear(2, 2)
    assert replace(spec.parallelize_fn, parallelize=lambda model: model)(model) is model
    assert told == [strict]


def test_strict_refuses_emulation_in_the_first_forward(debug_model):
    from fp8engine.errors import EmulationWarning, StrictError

    for strict in (True, False):
        model = debug_model(strict=strict).build()
        expected = pytest.raises(StrictError) if strict else pytest.warns(EmulationWarning, match="30 layers")
        for block in model.layers.values():
            block.attention.forward = lambda x, *_: x  # FlexAttention wants a card
        with expected, torch.no_grad():
            model(torch.zeros(1, 8, dtype=torch.long))


def test_dtensors_are_refused_by_name(debug_model):
    import types

    from fp8engine.errors import ParallelError

    with torch.device("meta"):
        model = debug_model().build()
    with pytest.raises(ParallelError, match=r"^layers\.\d\..*spmd_backend partial_dtensor.*take spmd_types"):
        model.parallelize(types.SimpleNamespace(spmd_backend="partial_dtensor", tp_enabled=True))


def test_another_checkpoint_manager_is_refused():
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from fp8engine.errors import ConversionError
    from fp8engine.integrations.torchtitan import Float8Converter, with_fp8

    class Other(CheckpointManager):
        from dataclasses import dataclass

        @dataclass(kw_only=True, slots=True)
        class Config(CheckpointManager.Config):
            pass

    config = llama3_debugmodel()
    config.checkpoint = Other.Config()
    with pytest.raises(ConversionError, match="save ScalingStates"):
        with_fp8(config, Float8Converter.Config())
