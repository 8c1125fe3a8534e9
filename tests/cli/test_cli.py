"""The command line, as a person and as a script use it: what is written and printed agrees, exit codes tell."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from command_line import call, refused, shown, told
from support import converted

import fp8engine
from fp8engine.cli import checks
from fp8engine.demo import Config
from fp8engine.demo.config import read
from fp8engine.demo.report import COLUMNS
from fp8engine.demo.trainer import Trainer
from fp8engine.errors import UnknownName
from fp8engine.ops import device

ROOT = Path(fp8engine.__file__).parents[1]
SMALLEST = ("--size", "tiny", "--batch", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """Six steps of three recipes: (folder, what was printed as JSON)."""
    out = tmp_path_factory.mktemp("report")
    return out, told("train", *SMALLEST, "--steps", 6, "-r", "fp32", "-r", "fp16", "-r", "delayed", "--out", out)


def test_screen_json_and_csv_tell_the_same(trained):
    out, printed = trained
    written = json.loads((out / "table.json").read_text())
    assert {key: printed[key] for key in written} == written
    with open(out / "table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["recipe"] for line in lines] == ["fp32", "fp16", "delayed"]
    for line, row in zip(lines, written["rows"], strict=True):
        assert list(line) == list(row) == list(COLUMNS)
        assert line == {key: "" if value is None else str(value) for key, value in row.items()}
    assert written["about"]["parameters"] == sum(p.numel() for p in trainer("fp32").model.parameters())
    assert "emulated" in written["note"]
    assert len(written["runs"]["delayed"]["curve"]["losses"]) == 6
    assert printed["files"] == [str(out / name) for name in ("table.json", "table.csv", "loss.png")]
    image = (out / "loss.png").read_bytes()
    width, height = (int.from_bytes(image[at : at + 4], "big") for at in (16, 20))
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    assert 1000 < width < 3000
    assert 500 < height < 2000


def trainer(recipe: str, steps: int = 6) -> Trainer:
    config = Config(size="tiny", batch=2, steps=steps)
    return Trainer(config, recipe, 0, read(None, config.shape.context))


def test_a_person_gets_the_table_and_what_the_model_writes(tmp_path: Path):
    text = shown("train", *SMALLEST, "--steps", 10, "-r", "fp32", "-r", "current", "--out", tmp_path)
    words = (
        "fp32          step 1/10  loss 5.",
        "reference",
        "(emulated)",
        "+0.00",
        "FP8 is emulated",
        "current writes",
    )
    assert [part for part in (*words, "The ", "loss.png") if part not in text] == []


def test_resume_goes_on_with_what_is_there(tmp_path: Path):
    arguments = ("train", *SMALLEST, "--out", tmp_path, "--checkpoint-every", 2, "-r", "fp32", "--steps")
    first, both = told(*arguments, 6), told(*arguments, 6, "-r", "rowwise", "--resume")
    assert both["runs"]["fp32"] == first["runs"]["fp32"]  # times of every step included: it was not trained again
    assert [row["steps"] for row in both["rows"]] == [6, 6]
    refused("steps 6 there, 7 here", *arguments, 7, "--resume")


def test_a_folder_that_holds_a_run_is_replaced_only_when_asked(tmp_path: Path):
    arguments = ("train", *SMALLEST, "--steps", 2, "-r", "fp32", "--out", tmp_path)
    first, path = told(*arguments), tmp_path / "checkpoints" / "fp32-seed0.pt"
    held = {file: file.read_bytes() for file in (path, tmp_path / "table.json")}
    remedy = "--resume goes on from its checkpoints, --overwrite replaces"
    refused(f"{tmp_path} holds a run ({path.name}, table.json): {remedy}", *arguments)
    refused(f"{tmp_path} holds a run (table.json): ", *arguments, "--seed", 1)  # whose table would be replaced
    assert all(file.read_bytes() == content for file, content in held.items())
    assert told(*arguments, "--resume")["runs"] == first["runs"]
    anew = told(*arguments, "--overwrite")
    assert anew["rows"][0]["steps"] == 2
    assert anew["runs"] != first["runs"]  # seconds of every step: it was trained again
    refused("--resume goes on with a run, --overwrite replaces it: give one", *arguments, "--resume", "--overwrite")


def test_resume_refuses_a_folder_without_the_checkpoint(tmp_path: Path):
    """A misspelt --out once began again at step 0, with exit code 0."""
    arguments = ("train", *SMALLEST, "--steps", 2, "-r", "fp32", "--out")
    shown(*arguments, tmp_path / "report")
    for words in (
        "reprot/checkpoints holds no checkpoint",
        "folders beside it with checkpoints: report (did you mean 'report'?). Name",
    ):
        refused(words, *arguments, tmp_path / "reprot", "--resume")
    refused("leave out --resume to start afresh", *arguments, tmp_path / "else" / "where", "--resume")
    assert os.listdir(tmp_path) == ["report"]
    needs = "holds fp32-seed0.pt, and --resume needs fp32-seed1.pt"
    refused(needs, *arguments, tmp_path / "report", "--resume", "--seed", 1)


def test_what_train_refuses(tmp_path: Path):
    (tmp_path / "file").write_text("")
    refused("did you mean 'rowwise'", "train", "--recipe", "rowise")
    refused("did you mean 'tiny'", "train", "--size", "tiney")
    for seed in (10**24, -(10**24), 2**40 + 1):  # torch's generator ends at 64 bits
        refused(f"seed={seed}: a seed is a whole number from -2^40 to 2^40", "train", "--seed", seed)
    refused(f"batch={10**24}: want 1 to 2^31 - 1", "train", "--batch", 10**24)
    refused("cannot write in", "train", "--out", tmp_path / "file")
    refused("No such file", "train", "--text", tmp_path / "none.txt", "--out", tmp_path)
    refused("device 'cuda:77' cannot be used", "train", "--device", "cuda:77")
    refused(
        "device 'meta' cannot be used: want 'cuda' or 'cpu'", "train", "--device", "meta", "--out", tmp_path / "new"
    )
    assert os.listdir(tmp_path) == ["file"]


def test_debug_shows_where_an_error_came_from():
    result = call("train", "--recipe", "rowise", "--debug")
    assert isinstance(result.exception, UnknownName)


@pytest.mark.slow
def test_ctrl_c_leaves_a_whole_checkpoint_and_the_report(tmp_path: Path):
    """Stopped after its first checkpoint, with a hundred thousand steps to go."""
    steps = 100_000
    arguments = ["train", *SMALLEST, "--steps", str(steps), "--out", str(tmp_path), "-r", "delayed", "-r", "fp32"]
    command = [sys.executable, "-m", "fp8engine", *arguments, "--checkpoint-every", "7"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        saved = tmp_path / "checkpoints" / "delayed-seed0.pt"
        while process.poll() is None and not saved.exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped early" in printed
    (row,) = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert 7 <= row["steps"] < steps
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    resumed = trainer("delayed", steps)
    resumed.load(saved)
    assert resumed.steps_done == row["steps"]
    assert os.listdir(saved.parent) == ["delayed-seed0.pt"]  # no half-written file, no next recipe


def test_doctor_finds_this_machine_well():
    found = told("doctor")
    assert found["ok"]
    assert found["problems"] == []
    (cpu,) = (one for one in found["devices"] if one["device"] == "cpu")
    recipes = ["auto", "current", "delayed", "rowwise", "rowwise_gw_hp", "blockwise", "mxfp8"]
    assert [row["recipe"] for row in cpu["recipes"]] == recipes
    assert all(row["trouble"] is None for row in cpu["recipes"])
    assert cpu["recipes"][0]["emulated"] != device.has_fp8(torch.device("cpu"))
    assert cpu["milliseconds"]["fp32"] > 0
    text = shown("doctor")
    assert "everything needed works" in text
    assert "has no FP8 Tensor Cores" in text


@pytest.mark.parametrize(
    ("package", "installed", "told"),
    [
        ("torch", "2.4.1+cu121", "torch 2.4.1+cu121 is installed; needed: torch>=2.11"),
        ("torch", None, "torch is not installed; needed: torch>=2.11"),
        ("triton", "3.5.1", "triton 3.5.1 is installed; needed: triton>=3.6,<3.10"),
        ("triton", "3.10.0", "triton 3.10.0 is installed; needed: triton>=3.6,<3.10"),
        ("torch", "2.11.0", None),
        ("torch", "2.13.0+cpu", None),
        ("torch", "3.0.0a1", None),
        ("triton", None, None),
    ],
)
def test_doctor_names_a_version_that_does_not_fit(package, installed, told, monkeypatch: pytest.MonkeyPatch):
    versions = {"torch": "2.13.0", "triton": "3.6.0"} | {package: installed}
    monkeypatch.setattr(checks, "version", versions.get)
    found = checks.examine()
    if told is None:
        assert found["problems"] == []
        assert any("fp8engine[hf]" in note for note in found["notes"])
        return
    (problem,) = found["problems"]
    assert problem.startswith(told)
    result = call("doctor")
    assert result.exit_code == 1
    assert told in result.stdout


def test_doctor_notices_results_that_are_wrong(monkeypatch: pytest.MonkeyPatch):
    forward = checks.Linear.forward
    monkeypatch.setattr(checks.Linear, "forward", lambda self, x: 1.5 * forward(self, x))
    result = call("doctor")
    assert result.exit_code == 1
    assert "recipe current: the input gradient is off by 1" in result.stdout


def test_doctor_tells_a_v100_which_torch_to_take(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "capability", lambda where: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    (note,) = checks._card_notes(torch.device("cuda", 0))
    assert "https://download.pytorch.org/whl/cu126" in note
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70", "sm_80"])
    (note,) = checks._card_notes(torch.device("cuda", 0))
    assert "FP8 is emulated" in note


@pytest.mark.parametrize(("ratio", "notes"), [(0.0, 1), (0.97, 0), (1.1, 0)])
def test_doctor_says_when_our_matmuls_were_not_measured_on_such_a_card(ratio, notes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "capability", lambda where: (9, 0))
    monkeypatch.setattr(checks.triton_backend, "measured", lambda *operation_and_size: ratio)
    found = checks._card_notes(torch.device("cuda", 0))
    assert len(found) == notes
    assert all("python -m benchmarks.tune --write" in note for note in found)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's module of three linear layers, the last a head, which `inspect` is called in."""
    (tmp_path / "models.py").write_text(
        "from torch import nn\n"
        "sizes = {'up': (32, 96), 'down': (96, 32), 'lm_head': (32, 64)}\n"
        "def small(): return nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})\n"
        "made = small()\ndef number(): return 7\ndef fails(): raise KeyError('weights')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "models", raising=False)
    return tmp_path


@pytest.mark.parametrize("target", ["models:small", "models:made"])
def test_inspect_of_a_function_by_hand(target: str, script: Path):
    found = told("inspect", target, "--override", "down=rowwise_gw_hp")
    assert [layer["recipe"] for layer in found["layers"]] == ["auto", "rowwise_gw_hp", None]
    assert "output head" in found["layers"][2]["reason"]
    sizes = 96 * 32, 32 * 96, 64 * 32
    share = (sizes[0] + sizes[1] * 2 / 3) / sum(sizes)
    assert found["totals"]["fp8_flops_share"] == pytest.approx(share, rel=1e-12)
    assert found["totals"]["converted"] == 2
    assert "" not in sys.path[:1]
    for option in (("--skip", "d*n"), ("--override", "down=bf16")):
        text = shown("inspect", target, *option)
        assert "1 of 3 linear layers would be in FP8, 37.5% of all their FLOPs" in text
        assert ("--skip d*n" in text) == ("--skip" in option)


def test_what_inspect_refuses(script: Path):
    (script / "empty").mkdir()
    refused("neither a folder that exists nor module:function", "inspect", "nowhere")
    refused("empty has no config.json", "inspect", "empty")
    refused("No module named 'nomodule'", "inspect", "nomodule:f")
    refused("has no attribute 'smal'", "inspect", "models:smal")
    refused("models:number gave int, not an nn.Module", "inspect", "models:number")
    refused("KeyError: 'weights'", "inspect", "models:fails")
    refused("did you mean 'delayed'", "inspect", "models:small", "--recipe", "delaid")
    refused("did you mean 'down'", "inspect", "models:small", "--skip", "dwn")
    refused("unknown overrides pattern", "inspect", "models:small", "--override", "x.*=bf16")
    refused("want GLOB=RECIPE", "inspect", "models:small", "--override", "down")


@pytest.mark.parametrize("command", ["inspect", "export"])
def test_a_name_that_is_too_long_for_a_folder_is_none(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    long, out = "x" * 300, [tmp_path / "out"] * (command == "export")
    refused(f"'{long}' is neither a folder that exists nor module:function", command, long, *out, alone=False)
    if command == "export":
        refused(f"cannot write {tmp_path / long}: File name too long", command, "models:small", tmp_path / long)


def test_inspect_of_a_model_folder_reads_no_weights(tmp_path: Path):
    """Two layers as wide as a 70B Llama, built where nothing is allocated."""
    size = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 2, "num_attention_heads": 64}
    config = transformers.LlamaConfig(**size, num_key_value_heads=8)  # pyright: ignore[reportArgumentType]
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    found = told("inspect", tmp_path, "--recipe", "blockwise")
    assert found["class"] == "LlamaForCausalLM"
    counts = {name: count for name, count in found["totals"].items() if name != "fp8_flops_share"}
    assert counts == {"layers": 15, "converted": 14, "in_fp8": 14, "left_alone": 1}
    assert found["layers"][0]["name"] == "model.layers.0.self_attn.q_proj"
    assert found["layers"][-1]["recipe"] is None
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    refused("is quantised already (fp8): want the 16- or 32-bit weights", "inspect", tmp_path)
    assert told("bench", "predict", tmp_path)["rows"]  # its sizes are the model's
    (tmp_path / "config.json").write_text("{")
    refused("transformers cannot build", "inspect", tmp_path)


@pytest.mark.parametrize(("kind", "chosen"), [("Mixtral", 2), ("Qwen2Moe", 3)])
def test_inspect_counts_the_experts_that_a_token_passes(tmp_path: Path, kind: str, chosen: int):
    """fe.inspect gives the same shares to the same model once it has run."""
    size = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": chosen, "moe_intermediate_size": 96}
    config = getattr(transformers, f"{kind}Config")(**size, **experts, intermediate_size=96, vocab_size=128)
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(tmp_path)
    found = told("inspect", tmp_path)
    up = next(layer for layer in found["layers"] if layer["name"].endswith("experts.gate_up_proj"))
    assert (up["shape"], up["experts"]) == ([8, 192, 64], [chosen, 8])
    assert up["reason"].endswith(f"; {chosen} of 8 a token")
    q = next(layer for layer in found["layers"] if layer["name"].endswith("q_proj"))
    assert q["experts"] is None
    assert up["flops_share"] / q["flops_share"] == pytest.approx(chosen * 192 * 64 / 64**2)
    shares = {layer["name"]: layer["flops_share"] for layer in found["layers"]}
    assert sum(shares.values()) == pytest.approx(1)

    model = converted(getattr(transformers, f"{kind}ForCausalLM")(config))
    model(input_ids=torch.arange(12)[None])
    report = fp8engine.inspect(model)
    assert found["totals"]["fp8_flops_share"] == pytest.approx(report.totals["fp8_flops_share"])
    assert {layer["name"]: layer["flops_share"] for layer in report.layers} == pytest.approx(shares)


ONE_OF_FOUR = {
    "codebooks of Moshi": "MoshiFlexibleLinear(16, 32, num_layers=4)",
    "experts of a GroupedLinear": "fe.GroupedLinear(4, 32, 16, recipe='current')",
}


@pytest.mark.parametrize("layer", ONE_OF_FOUR.values(), ids=ONE_OF_FOUR)
def test_a_row_passes_one_of_four_matrices(layer: str, script: Path):
    """All four were counted once; fe.inspect counts as much."""
    (script / "shared_out.py").write_text(
        "from torch import nn\nimport fp8engine as fe\n"
        "from transformers.models.moshi.modeling_moshi import MoshiFlexibleLinear\n"
        f"model = nn.ModuleDict({{'plain': nn.Linear(32, 16), 'shared': {layer}}})\n"
    )
    sys.modules.pop("shared_out", None)
    found = told("inspect", "shared_out:model")
    assert [row["experts"] for row in found["layers"]] == [None, [1, 4]]
    assert [row["flops_share"] for row in found["layers"]] == [0.5, 0.5]
    if "Moshi" in layer:
        assert found["layers"][1]["reason"].endswith("; 1 of 4 a token")
    model = converted(sys.modules["shared_out"].model)
    assert [row["flops_share"] for row in fp8engine.inspect(model).layers] == [0.5, 0.5]
