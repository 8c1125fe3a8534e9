"""Every committed configuration of every matmul, from its PTX: several tiles, K beyond the pipeline, ragged edges.

Then whole layers: each launch of a training step, compiled and executed as it would be on Hopper.

Operands are small integers under power-of-two scales, whose products and sums are exact in any order: bit for bit.
"""

import pytest
import torch

from benchmarks.checks import layers, matmuls
from benchmarks.checks.operands import counts, differs, exact, in_blocks, integers
from fp8engine.kernels.matmul import matmul_fp8, matmul_fp16
from fp8engine.kernels.tuning import Config, table
from fp8engine.numerics.formats import E4M3, E5M2
from fp8engine.ops import reference
from fp8engine.ops.reference import Epilogue, Operand

CPU = torch.device("cpu")
K = 784  # six blocks of 128 and one of 16: more than a pipeline of four stages, an odd number, and a ragged one


def committed() -> list:
    """(operation, architecture, configuration), each configuration once."""
    rows = {
        (operation, int(arch.removeprefix("sm_")), config._replace(ratio=None))
        for operation, cards in table().items()
        for arch, configs in cards.items()
        for config in configs.values()
    }
    rows |= {(*row[:2], row[2]._replace(kernel="triton")) for row in rows}  # for what Gluon's cannot do
    return [
        pytest.param(*row, id=f"{row[0]} sm_{row[1]} {row[2]}")
        for row in sorted(rows, key=lambda row: (-row[1], str(row)))
    ]


def sizes(config: Config) -> tuple[int, int, int]:
    """(m, n, k) of 3 x 2 tiles on 4 programs, the last ones of 9 rows and 16 columns; odd where nothing is aligned."""
    odd = 0 if config.descriptors else 1
    return 2 * config.block_m + 9, config.block_n + 16 + odd, K + odd


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize(("operation", "architecture", "config"), committed())
def test_a_committed_configuration_is_exact(operation: str, architecture: int, config: Config, card):
    card(architecture)
    m, n, k = sizes(config)
    assert_exact(operation, config, (m, n, k))
    if config.descriptors and config.kernel == "triton":
        assert_exact(operation, config, (m, n - 1, k))  # rows of the result that no descriptor can write


def assert_exact(operation: str, config: Config, mnk: tuple[int, int, int]) -> None:
    """Integers under scales that are powers of two, with a bias, an activation and statistics where they may be."""
    m, n, k = mnk
    if operation == "matmul_fp16":
        a, b = (torch.randint(-2, 3, (rows, k)).bfloat16() for rows in (m, n))
        found = matmul_fp16(a, b, Epilogue(None, torch.float32), config)
        assert differs(found, (a.double() @ b.double().t()).float()) is None
    elif operation == "matmul_block":
        for rows in (1, 128):
            a, b = in_blocks(CPU, m, k, 1), in_blocks(CPU, n, k, rows)
            found = matmul_fp8(a, b, Epilogue(None, torch.float32), config=config)
            assert differs(found, exact(a, b, None)) is None
    else:
        promoted = operation.endswith("promoted")
        a, b = integers(CPU, m, k, E5M2, by_row=True), integers(CPU, n, k, E4M3, by_row=False)
        bias_N = torch.randint(-3, 4, (n,)).bfloat16()
        found = matmul_fp8(a, b, Epilogue(bias_N), promoted, config)
        assert differs(found, exact(a, b, bias_N).bfloat16()) is None
        ends = [
            Epilogue(None, E4M3.dtype, "relu", torch.tensor(0.125), torch.full((1,), -1.0), counts(CPU)) for _ in "ab"
        ]
        found, wanted = matmul_fp8(a, b, ends[0], promoted, config), reference.finish(exact(a, b, None), ends[1])
        assert differs(found.float(), wanted.float()) is None
        for ours, twins in zip(ends[0][4:], ends[1][4:], strict=True):
            assert ours is not None
            assert twins is not None
            assert ours.tolist() == twins.tolist()


@pytest.mark.slow
@pytest.mark.short
@pytest.mark.parametrize("k", [0, 16, 400])
def test_a_flattened_loop_computes_the_same_bits(k: int, card):
    """3 x 2 tiles on 4 programs, whose next tile is loaded before the one before is stored; random sums."""
    card(90)
    apart = Config(64, 64, 128, warps=4, descriptors=k > 0)  # nothing describes rows of no elements
    a, b = (Operand(torch.randn(rows, k).to(E4M3.dtype), torch.rand(rows, 1), 1, -1) for rows in (137, 80))
    groups = max(-(-k // 128), 1)
    in_groups = [x._replace(scale=torch.rand(len(x.data), groups), cols=128) for x in (a, b)]
    for launch in (
        lambda config: matmul_fp8(a, b, Epilogue(torch.randn(80)), False, config),
        lambda config: matmul_fp8(a, b, Epilogue(out=torch.float32), True, config),
        lambda config: matmul_fp8(in_groups[0], in_groups[1], Epilogue(), config=config),
        lambda config: matmul_fp16(a.data.bfloat16(), b.data.bfloat16(), Epilogue(), config._replace(block_k=64)),
    ):
        torch.manual_seed(0)
        first = launch(apart)
        torch.manual_seed(0)
        assert differs(launch(apart._replace(flatten=True)), first) is None


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
