"""SQNR of a down-projection whose input has a late outlier, plain and under fe.smooth: the table of docs/layers.md.

    python benchmarks/smooth.py           from a checkout with the dev extra; 10 s

dB of the result for the ordinary tokens, against float64 of the same input, after the channel has grown so many
octaves.  "whole": s_k = 2^floor(log2 amax_k), as Smooth-SwiGLU has it, where fe.smooth takes half of that logarithm.
The training: tests/helpers/late_outlier.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch
from common import machine, save

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from late_outlier import grown, ordinary_tokens

from fp8engine.autograd import smooth

OCTAVES = (0, 8, 12, 14)


def whole(x_MK: torch.Tensor) -> torch.Tensor:
    """s [K] of all of the amax."""
    amax_K = x_MK.detach().abs().amax(0).float()
    return torch.where(amax_K > 0, torch.exp2(torch.frexp(amax_K)[1] - 1.0), 1.0)


def main() -> None:
    """Train every case, print, write the result."""
    rows = []
    for recipe in ("current", "delayed", "rowwise", "blockwise"):
        for octaves in OCTAVES:
            row = {"recipe": recipe, "octaves": octaves, "plain": ordinary_tokens(grown(recipe, octaves))}
            row["smooth"] = ordinary_tokens(grown(recipe, octaves, smooth=True))
            with mock.patch.object(smooth, "scales", whole):
                row["whole"] = ordinary_tokens(grown(recipe, octaves, smooth=True))
            rows.append(row)
            print(recipe, octaves, *(f"{key} {row[key]:.1f}" for key in ("plain", "smooth", "whole")), flush=True)
    print(f"written to {save('smooth', {'machine': machine(), 'rows': rows})}")


if __name__ == "__main__":
    main()
