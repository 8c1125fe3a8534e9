"""Several real processes joined by gloo: `run(work, 2, ...)` returns what `work` returned on each rank.

For tests too.  `work` is a function of a module, called as work(rank, ranks, *arguments) with a process group
initialised; what it returns is saved by torch.save, so tensors are plain ones on the CPU.  Starting processes costs
seconds on a slow machine: one `run` in a module's fixture serves all of the module's tests.  A collective that waits
for a rank that never comes is an error after WAIT.
"""

import datetime
import tempfile
import time

import torch
import torch.distributed as dist

WAIT = datetime.timedelta(seconds=240)
SETTLE = 0.3  # seconds; a gloo thread that drops a collective while Python exits aborts it (pytorch pull 179291)


def run(work, ranks: int, *arguments) -> list:
    """What `work` returned on each rank.  Raises ProcessRaisedException with the traceback of the rank that failed."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, folder, work, arguments), ranks)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, work, arguments: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=WAIT)
    torch.save(work(rank, ranks, *arguments), f"{folder}/{rank}.pt")
    time.sleep(SETTLE)
    dist.destroy_process_group()
