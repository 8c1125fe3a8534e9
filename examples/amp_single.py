"""FP16 training in one process on one device, in four variants.

    python examples/amp_single.py [--model cnn] [--variant scaler] [--epochs 8] [--out runs/amp_single]
    tensorboard --logdir runs/amp_single
    python examples/amp_evaluate.py runs/amp_single/cnn-scaler/checkpoint.pt

Without options: both models in all four variants, a minute on two CPU cores (slower than FP32 there: a CPU without
FP16 instructions converts every number; a GPU's Tensor Cores do not).  Needs fp8engine[examples].
"""

from __future__ import annotations

import digits
import torch
from amp_common import DEVICE, Log, Options, folder, options, save, stop
from torch.nn import functional as F

import fp8engine as fe
from fp8engine.errors import Fp8EngineError


def train(model: str, variant: str, given: Options) -> str:
    """One model in one variant; what came out, in words."""
    learned, held_out = digits.load(DEVICE)
    torch.manual_seed(given.seed)
    net = digits.MODELS[model]().to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), given.rate)

    # O2: weights and activations in FP16, norms in FP32, and an optimizer that steps FP32 masters of the weights.
    # Left to itself decorate puts a scaler into the optimizer, and backward() and step() need no change; scaler=False
    # keeps it out, since the loop below has its own.
    if variant == "o2":
        net, optimizer = fe.amp.decorate(net, optimizer, level="O2", scaler=False)

    # Multiplies the loss, so that small gradients survive FP16, and divides the gradients before the step; a step with
    # Inf or NaN in them is skipped, and the scale halved.  Not enabled, it passes everything through.
    scaler = fe.amp.GradScaler(DEVICE, enabled=variant in ("scaler", "o2"))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, given.epochs)

    # Matmuls and convolutions in FP16, softmax, norms and losses in FP32.  Backward needs none of it: each op's
    # gradient runs in the dtype of its forward.
    amp = fe.amp.autocast(DEVICE, torch.float16, enabled=variant in ("autocast", "scaler"))

    place = folder(given, model, variant)
    log, percent = Log(place), 0.0
    for epoch in range(given.epochs):
        for batch in learned.batches(given.batch, 1000 * given.seed + epoch):
            with amp:
                logits = net(batch.images)
            loss = F.cross_entropy(logits.float(), batch.labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            log.gradients(net, scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            log.step(loss, scaler)
        schedule.step()
        with amp:
            percent = 100 * digits.accuracy(net, held_out)
        log.accuracy(percent)
    save(place / "checkpoint.pt", net, model, variant, percent)
    return f"{model} {variant:8s} {log.close(percent)}, loss scale {scaler.get_scale():g}"


if __name__ == "__main__":
    try:
        asked = options(__doc__, "runs/amp_single")
        for each in asked.models:
            for way in asked.variants:
                print(train(each, way, asked), flush=True)
    except Fp8EngineError as refused:
        stop(refused)
