"""Several real processes joined by gloo: `run(work, 2, ...)` returns what `work` returned on each rank.

For tests too.  `work` is a function of a module, called as work(rank, ranks, *arguments) with a process group
initialised; what it returns is saved by torch.save, so tensors are plain ones on the CPU.

Ranks are forked from a server, one a Python process, that has imported torch and fp8engine once: a rank starts in 0.1 s
instead of 4 s.  They share no memory, but hash strings alike: only ranks that are `fresh` show that an order taken from
a set of names differs from rank to rank.  The tests of FSDP, tensor parallelism and experts have such ranks once each.
A collective that waits for a rank that never comes is an error after WAIT; ranks that are not done after LIMIT are
killed.

A rank leaves by os._exit, without Python's own ending: a thread of gloo that drops a collective's last tensor while
Python ends is stopped in the middle of it, which aborts the process (pytorch pull 179291).  A rank that a signal ends
all the same prints the line of Python it ran.
"""

import datetime
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist

WAIT = datetime.timedelta(seconds=240)
LIMIT = 900.0  # seconds; the longest run of the tests takes a tenth on two cores
SETTLE = 0.3  # seconds; for what gloo's threads still send when a rank is done
IMPORTED = ["fp8engine", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
IMPORTED += ["torch._dynamo", "pytest"]  # what is not installed is left out by multiprocessing


def run(work, ranks: int, *arguments, fresh: bool = False, limit: float = LIMIT) -> list:
    """What `work` returned on each rank.  Raises ProcessRaisedException with the traceback of the rank that failed.

    fresh: each rank is a new interpreter, with hashes of its own.  limit: seconds, then TimeoutError and no rank lives.
    """
    multiprocessing.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as folder:
        passed = (ranks, folder, dict(os.environ), work, arguments)  # the server's environment is an older one
        method = "spawn" if fresh else "forkserver"
        started = torch.multiprocessing.start_processes(_rank, passed, ranks, join=False, start_method=method)
        end = time.monotonic() + limit
        while not started.join(max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                _kill(started.processes)
                raise TimeoutError(
                    f"{work.__module__}.{work.__qualname__}: {ranks} ranks were not done after {limit} s"
                )
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(ranks)]


def _kill(processes) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _rank(rank: int, ranks: int, folder: str, environment: dict[str, str], work, arguments: tuple) -> None:
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=WAIT)
    torch.save(work(rank, ranks, *arguments), f"{folder}/{rank}.pt")
    time.sleep(SETTLE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
