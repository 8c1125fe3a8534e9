"""Options, a log for TensorBoard, checkpoints and process groups: parts of the three training examples.

Nothing here is about mixed precision.  Data and models are in digits.py.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import digits
import torch
from torch import distributed, nn

import fp8engine as fe
from fp8engine.errors import Fp8EngineError, StateError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VARIANTS = {
    "fp32": "nothing",
    "autocast": "FP16 autocast, no loss scale",
    "scaler": "FP16 autocast and GradScaler",
    "o2": "FP16 weights, FP32 norms and masters, GradScaler",
}
GRADIENTS_EVERY = 10  # steps: a reduction and a wait a layer, too much for each one
SETTLE = 0.5  # seconds: many turns of a thread on a crowded machine; it needs one
KEYS = {"model", "variant", "accuracy", "weights"}  # of a checkpoint


@dataclass(frozen=True)
class Options:
    """What to train, how long, and where to keep it; small enough to be sent to other processes."""

    models: tuple[str, ...]
    variants: tuple[str, ...]
    epochs: int
    batch: int
    rate: float
    seed: int
    out: Path


def options(description: str | None, out: str) -> Options:
    """From the command line.  out: the default folder."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=digits.MODELS, action="append", help="may be repeated (both)")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="may be repeated (all four)")
    parser.add_argument("--epochs", type=int, default=8, help="(8)")
    parser.add_argument("--batch", type=int, default=32, help="over all processes together (32)")
    parser.add_argument("--rate", type=float, default=5e-3, help="AdamW's learning rate (0.005)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--out", type=Path, default=Path(out), metavar="DIR", help=f"checkpoints and logs ({out})")
    given = parser.parse_args()
    if min(given.epochs, given.batch) < 1:
        parser.error("--epochs and --batch: at least 1")
    return Options(
        models=tuple(given.model or digits.MODELS),
        variants=tuple(given.variant or VARIANTS),
        epochs=given.epochs,
        batch=given.batch,
        rate=given.rate,
        seed=given.seed,
        out=given.out,
    )


class Log:
    """TensorBoard's, in a folder a run: loss, accuracy, loss scale, skipped steps, gradient amax of each layer.

    Of several processes only the first keeps one: folder=None writes nothing.
    """

    def __init__(self, folder: Path | None):
        self.steps, self.skipped, self.last, self.started = 0, 0, math.nan, time.perf_counter()
        self.writer: Any = None
        if folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter  # optional
            except ImportError:
                raise StateError("the log needs TensorBoard: pip install 'fp8engine[examples]'") from None
            self.writer = SummaryWriter(str(folder))

    def step(self, loss: torch.Tensor, scaler: fe.amp.GradScaler) -> None:
        """After scaler.update()."""
        self.last, self.skipped = loss.item(), scaler.stats.skipped
        self._write("loss", self.last)
        self._write("loss scale", scaler.get_scale())
        self._write("skipped steps", self.skipped)
        self.steps += 1

    def gradients(self, net: nn.Module, scale: float) -> None:
        """After backward and before the step: the gradients still hold the scale, which is taken out here."""
        if self.writer is None or self.steps % GRADIENTS_EVERY:
            return
        for name, layer in net.named_modules():
            found = [p.grad.abs().amax().float() for p in layer.parameters(recurse=False) if p.grad is not None]
            if found:
                self._write(f"gradient amax/{name or 'model'}", torch.stack(found).max().item() / scale)

    def accuracy(self, percent: float) -> None:
        """After an epoch."""
        self._write("accuracy", percent)

    def close(self, percent: float) -> str:
        """What came out, in words."""
        if self.writer is not None:
            self.writer.close()
        seconds = time.perf_counter() - self.started
        return f"accuracy {percent:.2f} %, loss {self.last:.4f}, {self.skipped} steps skipped, {seconds:.1f} s"

    def _write(self, tag: str, value: float) -> None:
        if self.writer is not None:
            self.writer.add_scalar(tag, value, self.steps)


def folder(given: Options, model: str, variant: str) -> Path:
    """Of one run."""
    return given.out / f"{model}-{variant}"


def save(path: Path, net: nn.Module, model: str, variant: str, percent: float) -> None:
    """A checkpoint for amp_evaluate.py: the weights in the dtype they were trained in, and what they reached."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model, "variant": variant, "accuracy": percent, "weights": net.state_dict()}, path)


def restore(path: Path) -> dict[str, Any]:
    """What `save` wrote, with "net": the model with those weights, decorated where it was.

    Raises StateError for a file that is not there, not readable, or not of these examples.
    """
    if not path.is_file():
        raise StateError(f"no checkpoint at {path}: amp_single.py --out DIR writes DIR/cnn-scaler/checkpoint.pt")
    try:
        found = torch.load(path, map_location=DEVICE, weights_only=True)
    except Exception as error:  # any: torch, zipfile and pickle each raise their own for a broken file
        raise StateError(f"{path} is broken, or no checkpoint: {type(error).__name__}; train it again") from None
    if not isinstance(found, dict) or not found.keys() >= KEYS:
        raise StateError(f"{path} is no checkpoint of these examples, which hold {', '.join(sorted(KEYS))}")
    if found["model"] not in digits.MODELS or found["variant"] not in VARIANTS:
        raise StateError(f"{path} holds a {found['model']!r} in {found['variant']!r}: neither is known here")
    net = digits.MODELS[found["model"]]().to(DEVICE)
    if found["variant"] == "o2":
        net = fe.amp.decorate(net, level="O2")
    try:
        net.load_state_dict(found["weights"])
    except RuntimeError as error:
        told = str(error).splitlines()[-1].strip()
        raise StateError(f"{path} holds other weights than a {found['model']}'s: {told}") from None
    return {**found, "net": net}


@torch.no_grad()
def apart(model: nn.Module) -> float:
    """The largest difference between two processes in any weight; every process has to call it."""
    weights = torch.cat([p.float().flatten() for p in model.parameters()])
    most, least = weights.clone(), weights
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return (most - least).max().item()


def leave() -> None:
    """destroy_process_group, when gloo's threads are done with this process's Python objects.

    A gloo thread drops each finished collective, and the context that backward left in it, under the GIL.  If Python
    exits meanwhile, the process aborts (pytorch pull request 179291; 5 of 12 runs of a plain DDP script).
    """
    time.sleep(SETTLE)
    distributed.destroy_process_group()


def stop(error: Fp8EngineError) -> None:
    """One line, and the exit code of a wrong option."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
