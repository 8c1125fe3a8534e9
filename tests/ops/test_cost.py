"""The cost model of a layer: what has to hold whatever its constants are."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8engine import _torch
from fp8engine.numerics.cards import CARDS, H100_PCIE, H100_SXM, H200
from fp8engine.numerics.formats import FP32
from fp8engine.numerics.matmul_time import START
from fp8engine.numerics.recipe import MATMULS, blockwise, current, delayed, high_precision, mxfp8, rowwise
from fp8engine.numerics.recipe import rowwise_gw_hp as partly
from fp8engine.ops import cost, launches, predicted, scaled_mm
from fp8engine.ops.cost import Setting, layer_time, speedup, sums_of

LARGE, SMALL = (8192, 14336, 4096), (512, 512, 512)


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda card: card.name)
@pytest.mark.parametrize("recipe", [current(), delayed(), rowwise(), blockwise()], ids=lambda recipe: recipe.name)
def test_fp8_pays_for_large_layers_and_not_for_small_ones(recipe, card):
    assert speedup(recipe, *LARGE, card) > 1.05
    assert speedup(recipe, *SMALL, card) < 1.0


def test_16_bits_cast_nothing_and_a_predicted_scale_saves_a_read_and_a_launch_of_each_operand():
    found = layer_time(high_precision(), *LARGE)
    assert (found.casts, found.speedup) == (0.0, pytest.approx(1.0))
    assert 1.3 < layer_time(current(), *LARGE).casts / layer_time(delayed(), *LARGE).casts < 1.6  # 6 bytes, not 4


def test_more_memory_bandwidth_makes_casts_cheaper_and_bf16_no_faster():
    slow, fast = layer_time(current(), *LARGE, H100_SXM), layer_time(current(), *LARGE, H200)
    assert fast.casts == pytest.approx(slow.casts * H100_SXM.memory / H200.memory, rel=0.1)
    assert fast.bf16 == pytest.approx(slow.bf16, rel=0.01)
    assert layer_time(current(), *LARGE, H100_PCIE).bf16 > 1.4 * slow.bf16


def test_recipes_are_told_apart():
    """Rows are cast from two reads and promoted in one matmul of three; blocks from one, and scaled in all of them."""
    assert speedup(rowwise(), *LARGE) < speedup(delayed(), *LARGE)
    assert speedup(blockwise(), *LARGE) < speedup(delayed(), *LARGE)
    assert speedup(partly(), *LARGE) < speedup(rowwise(), *LARGE)
    assert [sums_of(rowwise(), name) for name in MATMULS] == ["fast", "fast", "promoted"]
    assert [sums_of(partly(), name) for name in MATMULS] == ["fast", "fast", None]


def test_groups_of_32_have_their_sums_scaled_four_times_as_often_as_those_of_128():
    """A Hopper card has no instruction that scales: a kernel's registers do, while the Tensor Cores wait."""
    found = cost.dispatched(mxfp8(), "forward", LARGE)
    assert found is not None
    config = found[1]
    assert (config.block_k, config.kernel) == (32, "triton")  # Gluon's kernel takes 128 alone
    waits = [1 / predicted.kernel_of("matmul_block", config._replace(block_k=k)).ceiling - 1 for k in (32, 128)]
    assert waits[0] == pytest.approx(4 * waits[1])
    assert speedup(mxfp8(), *LARGE) < 1.0 < speedup(blockwise(), *LARGE)


def test_launches_are_what_a_small_layer_pays_for(monkeypatch):
    assert 0.70 < speedup(delayed(), 2048, 1024, 1024) < 0.80  # two launches a cast; one launch a cast said 0.95
    before = layer_time(delayed(), *SMALL).casts
    one_more = lambda *given, made=launches.cast, **how: [*made(*given, **how), launches.Launch("cast")]  # noqa: E731
    monkeypatch.setattr(launches, "cast", one_more)
    assert layer_time(delayed(), *SMALL).casts == pytest.approx(before + 3 * START)  # x, w and dy


def test_a_bias_costs_its_gradient():
    """Under blockwise one launch more sums dy, and one less turns scales for torch: ours multiplies with a bias."""
    for recipe in (current(), blockwise(), high_precision()):
        plain, biased = (layer_time(recipe, *LARGE, H100_SXM, Setting(bias)) for bias in (False, True))
        passes = {"current": 4 / 32, "blockwise": 4 / 32, "bf16": 2}[recipe.name]  # bytes an element of y or dy
        took = {"current": 0, "blockwise": 0, "bf16": 1}[recipe.name] * START + passes * 8192 * 14336 / (
            cost.OTHERS * H100_SXM.memory
        )
        assert biased.casts - plain.casts == pytest.approx(took)


def test_a_weight_is_cast_once_for_all_microbatches_but_under_predicted_scales():
    for recipe, saves in ((current(), True), (partly(), True), (delayed(), False)):
        one, four = (layer_time(recipe, *LARGE, H100_SXM, Setting(microbatches=count)) for count in (1, 4))
        assert (four.casts < 0.95 * one.casts) == saves
        assert four.casts <= one.casts


def test_fp32_runs_without_tensor_cores():
    assert speedup(high_precision(FP32), *LARGE) < 0.1
    assert layer_time(high_precision(FP32), *LARGE).matmuls["dgrad"].limit == "FP32 units"


@pytest.mark.parametrize("shape", [(8192, 64, 128), (8192, 128, 128), (16, 16, 16), (128, 4096, 4096)])
def test_fp32_is_never_predicted_faster_than_16_bits(shape: tuple[int, int, int]):
    assert speedup(high_precision(FP32), *shape) <= 1


class Computed(TorchDispatchMode):
    """The operators that compute something, in order."""

    def __init__(self):
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran += [str(func)] * (not func.is_view and "empty" not in str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MATMULS)
@pytest.mark.parametrize("recipe", [current(), rowwise(), partly()], ids=lambda recipe: recipe.name)
def test_what_torch_launches_beside_its_own_matmul(recipe, name, monkeypatch):
    if sums_of(recipe, name) is None:
        return
    m, n, k = {"forward": (256, 128, 64), "dgrad": (256, 64, 128), "wgrad": (128, 64, 256)}[name]
    a, b = cost._operands(recipe, name, (m, n, k))
    if name == "dgrad" and not recipe.weight_serves_both:  # a view of what was cast
        b = b._replace(data=b.data.t().contiguous().t())
    monkeypatch.setattr(scaled_mm, "unsupported", lambda a, b: None)
    monkeypatch.setattr(_torch, "scaled_mm", lambda a, b, **how: a.new_empty(len(a), b.shape[1], dtype=torch.bfloat16))
    with Computed() as computed:
        scaled_mm.matmul(a, b, torch.empty(n, dtype=torch.bfloat16, device="meta") if name == "forward" else None)
    step = launches.Step(recipe, 256, 128, 64, bias=True, ours=())
    words = {"torch copy": "clone", "torch scales": "clone", "torch add": "add"}
    wanted = [f"aten.{words[each.kernel]}" for each in launches.product(step, name) if each.kernel in words]
    assert [ran.rpartition(".")[0] for ran in computed.ran] == wanted
