"""A small Llama trained by FSDP2 with weights gathered as FP8 codes, on NCCL or gloo; checkpoint and resume.

    torchrun --nproc-per-node 8 examples/fsdp2.py --recipe rowwise --steps 200 --out runs/fsdp2
    torchrun --nproc-per-node 8 examples/fsdp2.py --recipe rowwise --steps 400 --out runs/fsdp2 --resume

Needs `pip install 'fp8engine[hf]'`.  The text is read byte by byte (--text FILE; default: the demo's).  A run that
is resumed on as many ranks repeats the run that went on, bit for bit; on another number of ranks it goes on as well.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM

import fp8engine as fe
from fp8engine.demo.config import read
from fp8engine.errors import Fp8EngineError

ROWS, LENGTH = 4, 128  # sequences of a rank, and their bytes
SIZE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}


def batch(text: torch.Tensor, step: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's sequences [ROWS, LENGTH]; the same whenever the step is trained."""
    make = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (ROWS * ranks,), generator=make)[rank::ranks]
    return torch.stack([text[start : start + LENGTH] for start in starts.tolist()])


def train(given: argparse.Namespace, device: torch.device) -> None:
    """On one rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **SIZE))
    model.to(device)
    fe.convert(model, given.recipe)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fe.distributed.fsdp(model, mp_policy=policy)  # after this line, as with fully_shard: optimizer, loop, checkpoints
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaling": fe.scaling_state(model)}
    checkpoint = given.out / "checkpoint"
    if given.resume and fe.distributed.has_checkpoint(checkpoint):
        fe.distributed.load(checkpoint, **parts)
    elif given.resume and rank == 0:
        print(f"no checkpoint in {checkpoint}: begins anew")
    text = read(given.text and str(given.text), LENGTH).train.long()
    for step in range(schedule.last_epoch, given.steps):
        start = time.perf_counter()
        ids = batch(text, step, rank, ranks).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % given.every == 0 or step == given.steps - 1:
            mean = loss.detach().float()
            dist.all_reduce(mean)
            seconds = time.perf_counter() - start
            if rank == 0:
                words = f"step {step:4d}  loss {mean.item() / ranks:.6f}  gradient {norm.full_tensor().item():.3f}"
                print(f"{words}  {ids.numel() * ranks / seconds:,.0f} tokens/s", flush=True)
            else:
                norm.full_tensor()
    given.out.mkdir(parents=True, exist_ok=True)
    fe.distributed.save(checkpoint, **parts)
    report = fe.inspect(model)
    if rank == 0:
        print(f"checkpoint of step {given.steps} in {checkpoint}")
        print("\n".join(report.table().splitlines()[1:4]))


def main() -> None:
    """As one of torchrun's processes."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--recipe", default="rowwise")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--every", type=int, default=10, help="print every so many steps")
    options.add_argument("--text", type=Path)
    options.add_argument("--out", type=Path, default=Path("runs/fsdp2"))
    options.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if one is there")
    given = options.parse_args()
    if not dist.is_torchelastic_launched():
        sys.exit("start it with torchrun: torchrun --nproc-per-node 2 examples/fsdp2.py")
    card = torch.cuda.is_available()
    dist.init_process_group("nccl" if card else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if card else torch.device("cpu")
    if card:
        torch.cuda.set_device(device)
    try:
        train(given, device)
    except Fp8EngineError as error:
        sys.exit(f"error: {error}")
    finally:
        time.sleep(0.3)  # gloo's threads still hold Python objects (pytorch pull request 179291)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
