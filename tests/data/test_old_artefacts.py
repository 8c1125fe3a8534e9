"""What fp8engine 0.1 wrote (tests/data/v0_1): it is read, computes what it computed, and goes on.

Pickles name classes by the modules that those were in then.  OLD holds these names: a file made again by a later engine
has others, and fails here.  Codes, scales and histories are compared to the bit.  Outputs were computed on another CPU,
whose sums may differ by 2^-22; then one element in 2^18 is cast to the neighbouring code, 2^-3 away at most.  Where it
is one of the 16 that a sum has, its row is off by 16^-1/2 2^-3, 30 dB, and all 16 rows by 42 dB.  Under another scale
or recipe every element is rounded elsewhere: 31 dB at most.  LIMIT lies between.
"""

import io
import json
import pickle
import pickletools
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from data.v0_1 import make
from golden.trainings import digest, flat
from safetensors.torch import load_file
from support import sqnr

import fp8engine as fe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
LIMIT = 40.0  # dB; of a loss, which is a mean square, twice the relative error
RTOL = 2 * 10 ** (-LIMIT / 20)
EXPECTED = json.loads((make.FOLDER / "expected.json").read_text())

RECIPE = {"cast.Cast", "formats.Format", "recipe.Recipe"}
STATE = {"functional.numerics.Numerics", "output_slots.OutputSlots", "scaling.ScalingState", "shared_input.SharedInput"}
LAYER = RECIPE | STATE | {"modules.linear.Linear"}
CONTROLLER = {
    "choice.Choice", "controller.alarm.Trend", "controller.controller.Controller", "controller.history.History",
    "controller.history.Looks", "controller.history.Spread", "controller.log.Change", "controller.log.SlotChange",
    "controller.outputs.Outputs", "policy_output.Stored", "recipe.Auto",
}  # fmt: skip
SERVED = RECIPE | STATE | {"export.quantizer.Fp8EngineConfig", "export.quantizer.Fp8EngineQuantizer"}
FUSED = LAYER | {"functional.parts.Memory", "modules.layernorm_linear.LayerNormLinear"}
# File -> names that its pickle has to hold, below fp8engine.
OLD: dict[str, set[str]] = {
    "delayed.pt": LAYER | {"cast.PerTensor", "convert.Record"},
    "fresh.pt": LAYER | {"modules.first_forward.FirstForward"},
    "auto.pt": LAYER | CONTROLLER,
    "by_hand.pt": FUSED
    | {
        "cast.PerRow", "modules.attention.Attention", "modules.attention.Heads", "modules.layernorm_mlp.LayerNormMLP",
        "modules.transformer.MLP", "modules.transformer.TransformerLayer",
    },
    "zero_centred.pt": FUSED
    | {"modules.layernorm_linear.ZeroCentredLayerNorm", "modules.layernorm_linear.ZeroCentredRMSNorm"},
    "encoder.pt": LAYER | {"modules.mixed._again", "modules.torch_transformer.CallsItsLayers"},
    "grouped.pt": RECIPE | STATE | {"modules.grouped.GroupedLinear"},
    "llama_fused.pt": LAYER
    | {
        "modules.lazy.FusedActivation", "modules.lazy.FusedNorm", "modules.lazy.Group", "modules.mixed._again",
        "reference.norm_quantize.Norm",
    },
    "gpt2.pt": RECIPE | STATE | {"modules.conv1d.Float8Conv1D"},
    "mixtral.pt": LAYER | {"modules.experts.Float8Experts", "modules.mixed._again"},
    "served_current.pt": SERVED | {"modules.serving.ServedLinear"},
    "served_rowwise.pt": SERVED | {"modules.serving_conv1d.ServedConv1D"},
    "report.pkl": CONTROLLER | STATE | {"report.table.Report"},
    "float8.pt": {"cast.PerBlock", "cast.PerRow", "cast.PerTensor", "tensor._rebuild"},
    "flow.pkl": {"flow.result.Consumer", "flow.result.Flow", "flow.result.Layer"},
    "scaler.pkl": {"amp.scale_rules.ScaleRules", "amp.scale_rules.Tally", "amp.scaler.GradScaler"},
    **{f"export_{name}.pkl": {"export.write.ExportReport"} for name in make.EXPORTS},
    **{
        f"value_recipe_{name}.pkl": RECIPE
        for name in ("current", "delayed", "rowwise", "rowwise_gw_hp", "blockwise", "fp16")
    },
    "value_recipe_auto.pkl": {"cast.Cast", "formats.Format", "recipe.Auto"},
    "value_formats.pkl": {"formats.Format"},
    "value_casts.pkl": {"cast.Cast", "cast.PerRow", "cast.PerTensor"},
    "value_block.pkl": {"cast.PerBlock"},
    "value_heads.pkl": {"modules.attention.Heads"},
    "value_rules.pkl": {"amp.scale_rules.ScaleRules"},
    "value_description.pkl": {
        "describe.Description", "families.Attention", "families.Block", "families.Experts", "families.Structure",
    },
}  # fmt: skip
PLAIN = ("delayed_state.pt", "auto_state.pt", "scaler_state.pt")  # tensors and plain values: no name of ours


@pytest.fixture(autouse=True)
def quiet():
    """On the backend that the files were made on."""
    with make.quiet():
        yield


def unpickled(name: str, weights_only: bool = False) -> Any:
    """What a file holds."""
    if name.endswith(".pt"):
        found = torch.load(io.BytesIO(make.read(name)), weights_only=weights_only)
    else:
        found = pickle.loads(make.read(name))
    # An editable install of another checkout answers for modules that this one lacks.
    ours = {key: getattr(module, "__file__", None) for key, module in sys.modules.items()}
    here = Path(fe.__file__).parent
    assert not [k for k, file in ours.items() if k.startswith("fp8engine.") and file and here not in Path(file).parents]
    return found


def near(found: torch.Tensor, name: str) -> None:
    """The output of a name's model as it was recorded."""
    wanted = EXPECTED[name]["output"]
    assert sqnr(torch.tensor(wanted), torch.tensor(make.rounded(found))) > LIMIT


def names_in(name: str) -> set[str]:
    """Modules and names of ours in a file's pickle."""
    raw = make.read(name)
    if zipfile.is_zipfile(io.BytesIO(raw)):
        with zipfile.ZipFile(io.BytesIO(raw)) as parts:
            (inner,) = (part for part in parts.namelist() if part.endswith("/data.pkl"))
            raw = parts.read(inner)
    found = (str(arg).split() for op, arg, _ in pickletools.genops(raw) if op.name == "GLOBAL")
    return {f"{module}.{what}".removeprefix("fp8engine.") for module, what in found if module.startswith("fp8engine.")}


def rtol(name: str) -> float:
    """`auto` goes on with other casts than 0.1 did: each loss moves by about FP8's share of it, twice what RTOL is."""
    return 2 * RTOL if name == "auto" else RTOL


@pytest.mark.parametrize("name", OLD)
def test_the_files_are_those_of_0_1(name: str):
    assert OLD[name] <= names_in(name)


def test_every_file_is_read_here():
    files = {path.name.removesuffix(".xz") for path in make.FOLDER.glob("*.xz")}
    assert files == set(OLD) | set(PLAIN)
    assert all(names_in(name) == set() for name in PLAIN)


@pytest.mark.parametrize("name", make.MODELS)
def test_a_whole_model_computes_what_it_computed_and_goes_on(name: str):
    model, wanted = unpickled(f"{name}.pt"), EXPECTED[name]
    assert digest(*flat(fe.scaling_state_dict(model)["slots"])) == wanted["state"]
    near(make.output(name, model), name)
    assert make.train(name, model, make.BEFORE, make.AFTER) == pytest.approx(wanted["after"], rel=rtol(name))
    assert fe.inspect(model).totals["fp8_flops_share"] > 0


@pytest.mark.parametrize("name", make.MODELS)
def test_a_whole_model_is_of_todays_classes(name: str):
    """Not of others with the names of then: what asks `isinstance` knows them."""
    old, new = unpickled(f"{name}.pt"), make.MODELS[name]()
    kinds = [[type(module).__mro__ for module in model.modules()] for model in (old, new)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("name", ["delayed", "auto"])
def test_a_saved_state_is_resumed(name: str):
    saved = unpickled(f"{name}_state.pt", weights_only=True)
    model = make.MODELS[name]()
    model.load_state_dict(saved["model"])
    fe.load_scaling_state_dict(model, saved["scaling"])
    assert digest(*flat(fe.scaling_state_dict(model)["slots"])) == EXPECTED[name]["state"]
    pickled = unpickled(f"{name}.pt")
    assert fe.inspect(model).decisions == fe.inspect(pickled).decisions
    after = make.train(name, model, make.BEFORE, make.AFTER)
    assert after == make.train(name, pickled, make.BEFORE, make.AFTER)
    assert torch.equal(make.output(name, model), make.output(name, pickled))
    assert after == pytest.approx(EXPECTED[name]["after"], rel=rtol(name))


def test_a_plan_is_repeated(tmp_path: Path):
    """Each change at its step, for its reason; and what is then saved as a plan is the same."""
    path = make.FOLDER / "plan.json"
    model = fe.convert(make.chain(), fe.auto(plan=path), example_inputs=make.inputs("auto", 0)[0])
    losses = make.train("auto", model, 0, make.BEFORE + make.AFTER)
    assert losses == pytest.approx(EXPECTED["auto"]["before"] + EXPECTED["auto"]["after"], rel=RTOL)
    plan = json.loads(path.read_text())
    slots = [(c["step"], slot["slot"], slot["after"], slot["why"]) for c in plan["changes"] for slot in c["slots"]]
    found = [(d["step"], d["slot"], d["after"], d["why"]) for d in fe.inspect(model).decisions]
    assert found == slots
    assert len(slots) >= 4
    fe.inspect(model).save_plan(tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())
    assert [again[key] for key in ("version", "layers", "changes")] == [
        plan[key] for key in ("version", "layers", "changes")
    ]


def test_a_report_says_what_it_said(tmp_path: Path):
    report = unpickled("report.pkl")
    assert type(report) is fe.Report
    told = json.loads(json.dumps(report.to_dict()))
    assert told.pop("outliers") == []  # 0.1 looked for none; these tensors have none
    assert told == json.loads((make.FOLDER / "report.json").read_text())
    assert "E4M3" in report.table()
    report.to_html(tmp_path / "report.html")
    report.save_plan(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["layers"] == {"0": [32, 16], "1": [16, 32], "3": [16, 16]}


@pytest.mark.parametrize("name", make.EXPORTS)
def test_an_export_is_served(name: str):
    near(make.output(name, fe.hf.load(make.FOLDER / f"export_{name}")), name)


@pytest.mark.parametrize("name", make.EXPORTS)
def test_the_same_model_is_exported_to_the_same_bytes(name: str, tmp_path: Path):
    """Codes, scales, names of tensors, and config.json but for transformers' own version."""
    make.export(name, tmp_path / "out")
    old, new = (
        load_file(folder / "model.safetensors") for folder in (make.FOLDER / f"export_{name}", tmp_path / "out")
    )
    assert old.keys() == new.keys()
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in old.values())
    for key, tensor in old.items():
        assert digest(tensor) == digest(new[key]), key
    old, new = (
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (make.FOLDER / f"export_{name}", tmp_path / "out")
    )
    assert old == new


@pytest.mark.parametrize("name", ["current", "rowwise"])
def test_a_pickled_served_model_serves(name: str):
    model, loaded = unpickled(f"served_{name}.pt"), fe.hf.load(make.FOLDER / f"export_{name}")
    near(make.output(name, model), name)
    assert torch.equal(make.output(name, model), make.output(name, loaded))
    assert [type(module) for module in model.modules()] == [type(module) for module in loaded.modules()]


@pytest.mark.parametrize("name", make.EXPORTS)
def test_an_exports_report_is_read(name: str):
    report = unpickled(f"export_{name}.pkl")
    assert type(report) is fe.hf.ExportReport
    assert re.match(rf"export_{name}: \d layers in FP8 \(.*{name}; layout ", str(report))


@pytest.mark.parametrize("weights_only", [True, False])
def test_fp8_tensors_are_read_also_where_no_code_may_be(weights_only: bool):
    old, new = unpickled("float8.pt", weights_only), make.quantized()
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        assert type(tensor) is fe.Float8Tensor
        assert tensor.granularity == new[name].granularity
        assert digest(tensor.data, tensor.scale) == digest(new[name].data, new[name].scale)
        assert torch.equal(tensor.dequantize(), new[name].dequantize())


def test_values_equal_todays():
    for name, value in make.values().items():
        found = unpickled(f"value_{name}.pkl")
        assert found == value, name
        assert type(found) is type(value)
        assert str(found) == str(value)


def test_a_flow_says_what_it_said():
    flow = unpickled("flow.pkl")
    assert type(flow) is fe.flow.Flow
    assert str(flow) == EXPECTED["flow"] == str(fe.flow.record(make.chain(), make.inputs("auto", 0)))


def test_a_loss_scale_goes_on():
    resumed = make.scaler()
    resumed.load_state_dict(unpickled("scaler_state.pt", weights_only=True))
    pickled = unpickled("scaler.pkl")
    assert type(pickled) is fe.amp.GradScaler
    for scaler in (resumed, pickled):
        assert scaler.get_scale() == EXPECTED["scaler"]["before"][-1]
        assert make.scaler_steps(scaler) == EXPECTED["scaler"]["after"]
