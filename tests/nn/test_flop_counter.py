"""torch's FlopCounterMode counts a converted layer's matmuls as it counts nn.Linear's: 2 M N K each."""

import pytest
import torch
from support import EVERY_FP8_RECIPE, converted
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fp8engine as fe

ROWS, WIDTH, INNER = 24, 32, 48


def flops(model: nn.Module, *given) -> int:
    """Of a forward and a backward, to the input too."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x, *given).square().mean().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("recipe", [*EVERY_FP8_RECIPE, "auto", "bf16"])
@pytest.mark.parametrize("kind", ["mlp", "gated"])
def test_a_converted_model_has_the_flops_of_its_matmuls(recipe: str, kind: str):
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
    if kind == "gated":
        model = Gated()
    matmuls = 2 if kind == "mlp" else 3
    found = flops(converted(model, recipe))
    assert found == 3 * matmuls * 2 * ROWS * WIDTH * INNER  # forward, dgrad, wgrad


class Gated(nn.Module):
    """A gated MLP behind a norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        x = self.norm(x)
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("recipe", EVERY_FP8_RECIPE)
def test_experts_have_those_of_all_rows(recipe: str):
    found = flops(fe.GroupedLinear(3, WIDTH, INNER, recipe=recipe), [5, 0, ROWS - 5])
    assert found == 3 * 2 * ROWS * WIDTH * INNER


def test_attention_in_fp8_has_those_of_torchs():
    layer = fe.Attention(128, fe.Heads(2, width=64, causal=True, softmax="fp8"), recipe="current")
    x = torch.randn(3, 10, 128, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    projections = 4 * 3 * 2 * 30 * 128 * 128
    product = 2 * 3 * 2 * 10 * 10 * 64  # of 3 x 2 heads; 2 in forward, and 5 in backward, one of which is made again
    assert counter.get_total_flops() == projections + 7 * product
