"""FP16 training with DistributedDataParallel: a process a card, or two processes on a CPU.

    torchrun --nproc-per-node 2 examples/amp_ddp.py [--model cnn] [--variant scaler] [--epochs 8] [--out runs/amp_ddp]
    python examples/amp_ddp.py                          the same; starts its processes itself

Each process takes its share of every batch and has a scaler of its own.  These stay equal with nothing sent between
them: DDP averages the gradients before the scaler checks them, so Inf in one process is Inf in all, and all skip.
Hence loss.backward() must be the scaled loss's, and clipping comes after scaler.unscale_.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import digits
import torch
from amp_common import DEVICE, Log, Options, apart, folder, leave, options, save, stop
from torch import distributed, multiprocessing
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fp8engine as fe
from fp8engine.errors import Fp8EngineError

BACKEND = "nccl" if DEVICE == "cuda" else "gloo"


def train(model: str, variant: str, given: Options) -> str:
    """One model in one variant, in each process; what came out, in words."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    learned, held_out = digits.load(DEVICE)
    torch.manual_seed(given.seed)
    net = digits.MODELS[model]().to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), given.rate)
    if variant == "o2":  # before DDP, which then averages FP16 gradients
        net, optimizer = fe.amp.decorate(net, optimizer, level="O2", scaler=False)
    parallel = DistributedDataParallel(net)
    scaler = fe.amp.GradScaler(DEVICE, enabled=variant in ("scaler", "o2"))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, given.epochs)
    amp = fe.amp.autocast(DEVICE, torch.float16, enabled=variant in ("autocast", "scaler"))

    place = folder(given, model, variant)
    log, percent = Log(place if rank == 0 else None), 0.0
    for epoch in range(given.epochs):
        for batch in learned.batches(given.batch, 1000 * given.seed + epoch, slice(rank, None, ranks)):
            with amp:  # one process drives one device: around the call is enough
                logits = parallel(batch.images)
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
    if rank == 0:
        save(place / "checkpoint.pt", net, model, variant, percent)
    told = f"{model} {variant:8s} {log.close(percent)}, loss scale {scaler.get_scale():g}"
    return f"{told}; weights of {ranks} processes differ by {apart(net):g}"


def process(rank: int, ranks: int, given: Options, meeting: str) -> None:
    """One of `ranks` processes; -1 for both where torchrun knows them."""
    if DEVICE == "cuda":
        torch.cuda.set_device(distributed.get_node_local_rank(rank))
    distributed.init_process_group(BACKEND, meeting, rank=rank, world_size=ranks)
    first = distributed.get_rank() == 0
    try:
        if first:
            print(f"{distributed.get_world_size()} processes over {BACKEND}", flush=True)
        for model in given.models:
            for variant in given.variants:
                told = train(model, variant, given)
                if first:
                    print(told, flush=True)
    finally:
        leave()  # destroy_process_group, and what torch 2.13 needs before it


def main(given: Options) -> None:
    """As one of torchrun's processes, or as the one that starts them."""
    if distributed.is_torchelastic_launched():
        process(-1, -1, given, "env://")
        return
    digits.load()  # what is missing is said once, not by each process
    ranks = torch.cuda.device_count() if DEVICE == "cuda" else 2
    with tempfile.TemporaryDirectory() as meeting:
        multiprocessing.spawn(process, (ranks, given, f"file://{Path(meeting)}/ranks"), nprocs=ranks)


if __name__ == "__main__":
    try:
        main(options(__doc__, "runs/amp_ddp"))
    except Fp8EngineError as refused:
        stop(refused)
