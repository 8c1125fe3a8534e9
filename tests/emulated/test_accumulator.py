"""The accumulator of the emulated card's FP8 products against mmaemu, a model of recorded H100 and RTX 4060 results."""

import ml_dtypes
import numpy as np
import pytest
import torch
from emulator import accumulator
from mmaemu.model.chain import dot

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
PRESETS = {89: "ada", 90: "hopper"}
DATA = {
    "normal": lambda shape: torch.randn(shape) * 30,
    "positive": lambda shape: torch.rand(shape) * 400,
    "subnormal": lambda shape: torch.randn(shape) * 2.0**-8,
    "many octaves": lambda shape: torch.randn(shape) * torch.randint(-14, 8, shape).float().exp2(),
    "mostly zero": lambda shape: torch.randn(shape) * (torch.rand(shape) < 0.1),
}


@pytest.mark.parametrize("architecture", PRESETS)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("kinds", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_sums_are_those_of_the_recorded_cards(architecture: int, data: str, kinds: tuple[str, str]):
    a, b = (DATA[data]((rows, 96)).to(DTYPES[kind]) for rows, kind in zip((24, 40), kinds, strict=True))
    for c in (torch.zeros(24, 40), torch.randn(24, 40) * 1e3, torch.randn(24, 40) * 1e-20):
        # Pairs of rows: mmaemu's `dot` takes vectors.
        wanted = dot(
            a[:, None].expand(24, 40, 96), b[None].expand(24, 40, 96), c.double(), preset=PRESETS[architecture]
        )
        found = accumulator.add(a.float().numpy(), b.float().numpy(), c.numpy(), kinds, architecture)
        assert np.array_equal(found.view(np.int32), wanted.float().numpy().view(np.int32))


@pytest.mark.parametrize("architecture", PRESETS)
def test_nan_and_inf_are_ieees(architecture: int):
    a = np.array([[np.nan, 1], [np.inf, 1], [1, 2], [np.inf, -np.inf]], ml_dtypes.float8_e5m2).astype(np.float32)
    b = np.ones((1, 2), np.float32)
    found = accumulator.add(a, b, np.zeros((4, 1), np.float32), ("e5m2", "e4m3"), architecture)
    assert np.array_equal(found[:, 0], [np.nan, np.inf, 3, np.nan], equal_nan=True)
