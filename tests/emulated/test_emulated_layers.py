"""Whole layers on the emulated card: each launch of a training step, compiled and executed as it would be on Hopper."""

from __future__ import annotations

import pytest
import torch

from benchmarks.checks import layers, matmuls

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.short
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "rowwise_gw_hp", "blockwise"])
def test_a_linears_step_is_that_of_its_emulation(recipe: str, card):
    there = card()
    assert layers.emulated(CPU, recipe, more=False) is None
    assert {"_matmul_kernel"} & {done.kernel for done in there.done}


@pytest.mark.slow
def test_nans_reach_the_output_and_are_counted(card):
    card()
    assert matmuls.not_finite(CPU) is None


@pytest.mark.slow
def test_random_sums_are_within_their_measured_error(card):
    card()
    assert matmuls.accuracy(CPU, 256) is None


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 5, 7), (64, 32, 0), (130, 257, 129)], ids=str)
def test_odd_sizes_under_every_epilogue(shape: tuple[int, int, int], card):
    card()
    assert matmuls.epilogues(CPU, shape) is None
