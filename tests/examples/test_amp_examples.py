"""examples/amp_*.py as a reader runs them: they learn, log, agree between processes, and their checkpoints are read."""

import importlib
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tensorboard.backend.event_processing import event_accumulator as accumulator

from benchmarks.amp import Cell, Part, train
from fp8engine.errors import StateError

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCHS = 2
VARIANTS = ("fp32", "autocast", "scaler", "o2")
LOGGED = {"loss", "accuracy", "loss scale", "skipped steps"}
# Two epochs read over 85 % of the digits right for every seed tried; chance is 10.
FLOOR = 75.0
TOLD = re.compile(
    r"(?P<model>cnn|vit) (?P<variant>\w+) +accuracy (?P<accuracy>[\d.]+) %, loss (?P<loss>[\d.]+),"
    r" (?P<skipped>\d+) steps skipped, [\d.]+ s, loss scale (?P<scale>[\d.]+)"
)


def run(*arguments: object) -> str:
    """On the CPU, cards hidden: several would sum in another order, and DDP would start a process for each."""
    command = [sys.executable, "-W", "error::UserWarning", *map(str, arguments)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=hidden)
    assert done.returncode == 0, done.stderr
    return done.stdout


def told(output: str) -> dict[tuple[str, str], dict[str, str]]:
    return {(found["model"], found["variant"]): found.groupdict() for found in TOLD.finditer(output)}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("single")
    return run(EXAMPLES / "amp_single.py", "--epochs", EPOCHS, "--out", out), out


@pytest.mark.slow
def test_both_models_learn_in_every_variant(single):
    results = told(single[0])
    assert set(results) == {(model, variant) for model in ("cnn", "vit") for variant in VARIANTS}
    for (_, variant), found in results.items():
        assert float(found["accuracy"]) > FLOOR, found
        # 2^16 at first, halved by each skipped step; 80 steps are too few for it to grow
        scale = 2.0 ** (16 - int(found["skipped"])) if variant in ("scaler", "o2") else 1.0
        assert float(found["scale"]) == scale, found


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["scaler", "o2"])
def test_it_trains_what_the_benchmark_measures(single, variant: str):
    found = train(Cell("single", "cnn", variant, seed=0, epochs=EPOCHS), Part(torch.device("cpu")))
    shown = told(single[0])["cnn", variant]
    assert (shown["accuracy"], shown["loss"]) == (f"{found['accuracy']:.2f}", f"{found['loss']:.4f}")


@pytest.mark.slow
def test_the_log_holds_every_number(single):
    for name, layers in (("cnn-scaler", 5), ("vit-o2", 16)):
        events = accumulator.EventAccumulator(str(single[1] / name))
        events.Reload()
        tags = set(events.Tags()["scalars"])
        amaxes = {tag for tag in tags if tag.startswith("gradient amax/")}
        assert tags - amaxes == LOGGED
        assert len(amaxes) == layers
        assert len(events.Scalars("loss")) == EPOCHS * 40  # 1280 digits in batches of 32
        assert len(events.Scalars("accuracy")) == EPOCHS
        assert events.Scalars("loss scale")[0].value in (2.0**16, 2.0**15)
        # Of the unscaled loss: an amax of a healthy gradient is nowhere near the scale of 2^16.
        for tag in amaxes:
            found = [event.value for event in events.Scalars(tag)]
            assert all(0 < value < 10 or math.isinf(value) for value in found), (tag, found)
        last = f"{events.Scalars('accuracy')[-1].value:.2f}"
        model, variant = name.split("-")
        assert last == told(single[0])[model, variant]["accuracy"]


@pytest.mark.slow
def test_evaluation_finds_what_training_reported(single):
    paths = sorted(single[1].glob("*/checkpoint.pt"))
    lines = run(EXAMPLES / "amp_evaluate.py", *paths).splitlines()
    assert len(lines) == 8
    for (model, variant), line in zip((path.parent.name.split("-") for path in paths), lines, strict=True):
        wanted = told(single[0])[model, variant]["accuracy"]
        assert line.startswith(f"{model} {variant}"), line
        assert f"accuracy {wanted} % of 517" in line
        assert line.endswith(f"training reported {wanted} %")


@pytest.mark.slow
def test_data_parallel(single, tmp_path: Path):
    """On one device nn.DataParallel calls the module itself, so that nothing may differ."""
    options = ("--model", "cnn", "--variant", "autocast", "--variant", "o2", "--epochs", EPOCHS, "--out", tmp_path)
    output = run(EXAMPLES / "amp_dp.py", *options)
    assert "one device: nn.DataParallel calls the module itself" in output
    results = told(output)
    assert set(results) == {("cnn", "autocast"), ("cnn", "o2")}
    alone = told(single[0])
    assert results == {key: alone[key] for key in results}
    assert (tmp_path / "cnn-o2" / "checkpoint.pt").is_file()


@pytest.mark.parametrize("enabled", [True, False])
def test_data_parallel_enters_autocast_in_the_thread_that_runs_forward(common: ModuleType, enabled: bool):
    """What several cards would need, seen on one: nn.DataParallel runs forward in threads that it starts."""
    example = importlib.import_module("amp_dp")
    net, seen = common.digits.Cnn(), []
    net.classifier.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model = example.InsideForward(net, enabled)
    thread = threading.Thread(target=model, args=(torch.zeros(2, 1, 8, 8),))
    thread.start()
    thread.join()
    assert seen == [torch.float16 if enabled else torch.float32]


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["its own", "torchrun"])
def test_two_processes_end_with_the_same_weights(launcher: str, single, tmp_path: Path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2) if launcher == "torchrun" else ()
    options = ("--model", "cnn", "--variant", "scaler", "--variant", "o2", "--epochs", EPOCHS, "--out", tmp_path)
    output = run(*torchrun, EXAMPLES / "amp_ddp.py", *options)
    assert output.count("2 processes over gloo") == 1
    assert output.count("weights of 2 processes differ by 0\n") == 2
    results = told(output)
    assert set(results) == {("cnn", "scaler"), ("cnn", "o2")}
    assert all(float(found["accuracy"]) > FLOOR for found in results.values()), results
    for key, found in results.items():
        assert found["loss"] != told(single[0])[key]["loss"], "the loss of half a batch"
    for variant in ("scaler", "o2"):
        folder = tmp_path / f"cnn-{variant}"
        assert len(list(folder.glob("events.*"))) == 1, "one process keeps the log"
        assert torch.load(folder / "checkpoint.pt", weights_only=True)["weights"].keys() >= {"features.0.weight"}


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in ("amp_common", "amp_dp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("amp_common")


def test_a_checkpoint_comes_back_in_the_precision_it_was_trained_in(common: ModuleType, tmp_path: Path):
    path = tmp_path / "checkpoint.pt"
    net = common.fe.amp.decorate(common.digits.Vit(), level="O2")
    common.save(path, net, "vit", "o2", 50.0)
    back = common.restore(path)["net"]
    assert {name: p.dtype for name, p in back.named_parameters()} == {n: p.dtype for n, p in net.named_parameters()}
    assert back.head.weight.dtype == torch.float16
    images = torch.randn(4, 1, 8, 8)
    assert torch.equal(back(images), net(images))


def test_a_checkpoint_that_cannot_be_used_says_why(common: ModuleType, tmp_path: Path):
    path, net = tmp_path / "checkpoint.pt", common.digits.Cnn()

    def refused(told: str) -> None:
        with pytest.raises(StateError, match=told):
            common.restore(path)

    refused("no checkpoint at")
    common.save(path, net, "cnn", "fp32", 50.0)
    kept = path.read_bytes()
    assert common.restore(path)["accuracy"] == 50.0
    for broken in (b"", kept[:1000], kept[:-300]):
        path.write_bytes(broken)
        refused("broken, or no checkpoint")
    torch.save(net.state_dict(), path)
    refused("no checkpoint of these examples, which hold accuracy")
    for model, told in {"vgg": "'vgg'", "vit": "other weights than a vit's"}.items():
        common.save(path, net, model, "fp32", 50.0)
        refused(told)


@pytest.mark.slow
def test_a_missing_checkpoint_is_one_line_and_exit_code_2():
    command = [sys.executable, EXAMPLES / "amp_evaluate.py", "no/such/file.pt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no checkpoint at no/such/file.pt: amp_single.py")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("wrong", [("--epochs", "0"), ("--variant", "fp8"), ("--model", "vgg"), ("--batch", "-1")])
def test_wrong_options(common: ModuleType, wrong: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(sys, "argv", ["amp_single.py", *wrong])
    with pytest.raises(SystemExit) as stopped:
        common.options("", "runs")
    assert stopped.value.code == 2
    assert wrong[0] in capsys.readouterr().err
