"""Accuracy of checkpoints that amp_single.py, amp_dp.py and amp_ddp.py wrote, in the precision they were trained in.

python examples/amp_evaluate.py runs/amp_single/cnn-scaler/checkpoint.pt ...
"""

from __future__ import annotations

import argparse
from pathlib import Path

import digits
import torch
from amp_common import DEVICE, restore, stop

import fp8engine as fe
from fp8engine.errors import Fp8EngineError


def evaluate(path: Path) -> str:
    """One checkpoint; what came out, in words.  Raises StateError for one that cannot be used."""
    found = restore(path)
    _, held_out = digits.load(DEVICE)
    # autocast is no part of the weights and is entered again; a decorated model enters its own
    with fe.amp.autocast(DEVICE, torch.float16, enabled=found["variant"] in ("autocast", "scaler")):
        percent = 100 * digits.accuracy(found["net"], held_out)
    told = f"{found['model']} {found['variant']:8s} accuracy {percent:.2f} % of {len(held_out.labels)}"
    return f"{told}; training reported {found['accuracy']:.2f} %"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="+")
    try:
        for each in parser.parse_args().checkpoint:
            print(evaluate(each))
    except Fp8EngineError as refused:
        stop(refused)
