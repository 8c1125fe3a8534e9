"""Accelerate's and Lightning's own FSDP2, with weights gathered as FP8 codes."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8engine as fe
from benchmarks.distributed.fsdp import Net
from benchmarks.distributed.processes import run

SIZE = (33, 65)
# Lightning starts its second process by running the script again.
SCRIPT = """
import torch, lightning, fp8engine as fe
from benchmarks.distributed.fsdp import Net
from lightning.pytorch.strategies import ModelParallelStrategy

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = None, []

    def configure_model(self):
        if self.model is None:
            torch.manual_seed(0)
            self.model = fe.convert(Net(33, 65), "rowwise")
            fe.distributed.fsdp(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        loss = self.model(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

torch.manual_seed(1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 33)), batch_size=4)
module = Module()
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=3, **quiet)
trainer.fit(module, data)
gather = fe.inspect(module.model).totals["gather"]
with open(f"{trainer.global_rank}.txt", "w") as file:
    file.write(f"{len(module.losses)} {gather['as_codes']} {gather['weights']}")
"""


def accelerated(rank: int, ranks: int, gather: bool) -> tuple[list[float], int]:
    """Losses under Accelerate's FSDP2, and how many weights were gathered as codes."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    places: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511}
    os.environ.update({key: str(value) for key, value in places.items()})
    wrapped: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    wrapped |= {"reshard_after_forward": True, "cpu_ram_efficient_loading": False}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrapped)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # Accelerate takes FSDP2 on cards alone: told so here, its own code shards the model on the CPU.
    AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    torch.manual_seed(0)
    model: Any = fe.convert(Net(*SIZE), "rowwise")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    if gather:
        fe.distributed.gather_fp8(model)
    losses = []
    for step in range(3):
        x = torch.randn(8, SIZE[0], generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, (fe.inspect(model).totals["gather"] or {})["as_codes"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_accelerate_prepares_and_we_gather():
    plain, ours = (run(accelerated, 2, gather) for gather in (False, True))
    for (losses, none), (same, all_weights) in zip(plain, ours, strict=True):
        assert (none, all_weights) == (0, 7)
        assert losses == same
        assert len(set(same)) == 3


@pytest.mark.slow
def test_lightning_calls_fsdp_in_configure_model(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [Path(__file__).parents[2], *sys.path]))}
    environment["MASTER_PORT"] = str(free_port())
    command = [sys.executable, "-W", "ignore", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    # Files, and not a pipe: both ranks share it, and unbuffered prints of two processes mix.
    found = {file.name: file.read_text() for file in tmp_path.glob("*.txt")}
    assert found == {"0.txt": "3 7 7", "1.txt": "3 7 7"}, done.stdout + done.stderr


def free_port() -> int:
    """A free port below those that the system gives to connections, so no other test's connection can take it.

    Lightning's own choice is one of those, closed again and bound seconds later, when its rank 1 has imported torch.
    """
    for port in range(15000 + os.getpid() % 5000, 30000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError("no port between 15000 and 30000 is free")
