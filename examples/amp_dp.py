"""FP16 training with nn.DataParallel: one process, a thread a card.

    python examples/amp_dp.py [--model cnn] [--variant scaler] [--epochs 8] [--out runs/amp_dp]

One thing differs from amp_single.py: autocast belongs to a thread, so it is entered inside forward, which each thread
runs; around the call it would reach no replica.  O2 needs nothing, since a decorated model enters its own.  One
scaler serves all: the gradients of the replicas are summed before it checks them.

On a CPU, and with one card, nn.DataParallel has one device and calls the module itself: then this example shows how
to write it, and the numbers are amp_single.py's.  PyTorch recommends DistributedDataParallel (amp_ddp.py) for speed.
"""

from __future__ import annotations

import digits
import torch
from amp_common import DEVICE, Log, Options, folder, options, save, stop
from torch import nn
from torch.nn import functional as F

import fp8engine as fe
from fp8engine.errors import Fp8EngineError


class InsideForward(nn.Module):
    """A model whose forward enters autocast, in whichever thread runs it."""

    def __init__(self, net: nn.Module, enabled: bool):
        super().__init__()
        self.net, self.enabled = net, enabled

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images -> logits."""
        with fe.amp.autocast(images.device.type, torch.float16, enabled=self.enabled):
            return self.net(images)


def train(model: str, variant: str, given: Options) -> str:
    """One model in one variant; what came out, in words."""
    learned, held_out = digits.load(DEVICE)
    torch.manual_seed(given.seed)
    net = digits.MODELS[model]().to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), given.rate)
    if variant == "o2":  # before nn.DataParallel: replicas are made of the decorated model
        net, optimizer = fe.amp.decorate(net, optimizer, level="O2", scaler=False)
    parallel = nn.DataParallel(InsideForward(net, enabled=variant in ("autocast", "scaler")))
    scaler = fe.amp.GradScaler(DEVICE, enabled=variant in ("scaler", "o2"))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, given.epochs)

    place = folder(given, model, variant)
    log, percent = Log(place), 0.0
    for epoch in range(given.epochs):
        for batch in learned.batches(given.batch, 1000 * given.seed + epoch):
            loss = F.cross_entropy(parallel(batch.images).float(), batch.labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            log.gradients(net, scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            log.step(loss, scaler)
        schedule.step()
        percent = 100 * digits.accuracy(parallel, held_out)
        log.accuracy(percent)
    save(place / "checkpoint.pt", net, model, variant, percent)
    return f"{model} {variant:8s} {log.close(percent)}, loss scale {scaler.get_scale():g}"


if __name__ == "__main__":
    try:
        asked = options(__doc__, "runs/amp_dp")
        cards = torch.cuda.device_count()
        print(f"{cards} cards" if cards > 1 else "one device: nn.DataParallel calls the module itself", flush=True)
        for each in asked.models:
            for way in asked.variants:
                print(train(each, way, asked), flush=True)
    except Fp8EngineError as refused:
        stop(refused)
