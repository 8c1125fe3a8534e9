"""Writes to a weight that move no version counter: found on a CPU by sampled values; on a card nothing relies on them.

`as_on_a_card` takes the samples away: there, reading one would wait for the device.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import FP8_RECIPES, converted, numerics_of
from torch import nn
from transformers.pytorch_utils import Conv1D

import fp8engine as fe
from fp8engine.autograd import weight as weights
from fp8engine.ops.fingerprint import fingerprint

N, K = 32, 48


@pytest.fixture
def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a weight is read by the host."""
    monkeypatch.setattr(weights, "fingerprint", lambda weight, whole: [])


def of_weight(casts: list[tuple[str, tuple[int, ...]]]) -> int:
    """How many casts are a weight's."""
    return sum(shape in ((N, K), (K, N)) for _, shape in casts)


def train(layer: nn.Module, x: torch.Tensor, steps: int = 12) -> list[float]:
    """Losses of steps of gradient descent that write `p.data`, as many optimizers of other people do."""
    target, losses = x[:, 1:2].expand(-1, 8), []
    for _ in range(steps):
        layer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        for p in layer.parameters():
            assert p.grad is not None
            p.data -= 0.05 * p.grad
        losses.append(loss.item())
    return losses


def recast_at_every_use(layer: fe.Linear) -> fe.Linear:
    """The same layer, which keeps no copy of its weight."""
    twin = fe.Linear(layer.in_features, layer.out_features, recipe=numerics_of(layer).recipe)
    twin.load_state_dict(layer.state_dict())
    numerics_of(twin).weight.cache = False
    return twin


@pytest.mark.parametrize("width", [48, 64, 784])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_an_optimizer_that_writes_data_learns_though_a_feature_is_always_zero(recipe: str, width: int):
    """Like MNIST's first pixels: a column of zero gradients, in which all of eight samples once lay."""
    x = torch.randn(64, width)
    x[:, 0] = 0
    layer = fe.Linear(width, 8, recipe=recipe)
    twin = recast_at_every_use(layer)
    assert train(layer, x) == train(twin, x)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_an_optimizer_that_writes_data_is_followed_where_nothing_is_sampled(recipe: str, as_on_a_card):
    x, layer = torch.randn(64, K), fe.Linear(K, 8, recipe=recipe)
    assert layer.weight._version > 0, "its counter stands still, but not at 0"
    twin = recast_at_every_use(layer)
    losses = train(layer, x)
    assert losses == train(twin, x)
    assert losses[-1] < 0.7 * losses[0], "the exact value is the twin's; without learning it stays at the first"


def test_microbatches_share_a_cast_where_the_counter_was_seen_to_move(as_on_a_card, casts):
    layer = fe.Linear(K, N, recipe="current")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, foreach=False)
    counts = []
    for _ in range(4):
        for _ in range(3):
            layer(torch.randn(6, K, requires_grad=True)).sum().backward()
        counts.append(of_weight(casts))
        casts.clear()
        optimizer.step()
    # Three microbatches cast three times until the counter has moved once, then twice, then once a version.
    assert counts == [3, 2, 1, 1]


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_weights_changed_casts_again(recipe: str, kind: str, as_on_a_card):
    model = converted(nn.Sequential(nn.Linear(K, N) if kind == "linear" else Conv1D(N, K)), recipe).eval()
    x = torch.randn(6, K)
    with torch.no_grad():
        model[0].bias.zero_()
        before = model(x).clone()
        model[0].weight.data.mul_(2)
        fe.weights_changed(model)
        after = model(x)
    # Doubling is exact in every format and moves every scale by a power of two.
    assert torch.equal(after, 2 * before)


def test_weights_changed_refuses_a_model_that_is_not_converted():
    with pytest.raises(fe.errors.ConversionError, match=r"Sequential has no converted layers; call fe\.convert first"):
        fe.weights_changed(nn.Sequential(nn.Linear(4, 4)))


def test_nothing_holds_the_storage_of_a_weight_that_was_moved_away():
    layer = fe.Linear(K, N, recipe="current")
    layer(torch.randn(6, K)).sum().backward()
    layer.eval()(torch.randn(6, K))
    storage = layer.weight.untyped_storage()
    layer.weight.data = torch.empty(0)
    assert torch._C._storage_Use_Count(storage._cdata) == 1, "this test's own"


def test_a_new_parameter_at_the_old_address_is_another_weight(as_on_a_card):
    layer = fe.Linear(K, N, bias=False, recipe="current").eval()
    x, memory = torch.randn(6, K), torch.randn(N, K)
    with torch.no_grad():
        layer.weight = nn.Parameter(memory)
        layer.weight.add_(0)
        first = layer(x).clone()
        memory.data.mul_(2)
        layer.weight = nn.Parameter(memory.detach())  # the same address and version counter
        assert torch.equal(layer(x), 2 * first)


@pytest.mark.parametrize("stored_by_row", [True, False])
@pytest.mark.parametrize("shape", [(10, 784), (784, 10), (1, 4096), (4096, 4096), (512, 512), (33, 5), (64, 128)])
def test_samples_are_spread_over_rows_and_columns(shape: tuple[int, int], stored_by_row: bool):
    n, k = shape
    index = torch.arange(n * k).view(shape)
    weight = index.float() if stored_by_row else index.t().contiguous().t().float()
    found = torch.tensor(fingerprint(weight, whole=False)).long()
    assert 20 <= len(found) <= 64
    rows, columns = (found // k).unique(), (found % k).unique()
    assert len(rows) >= min(n, 20)
    assert len(columns) >= min(k, 20)
    for places, size in ((rows, n), (columns, k)):
        gaps = torch.diff(torch.cat([torch.tensor([-1]), places, torch.tensor([size])]))
        assert gaps.max() <= max(size // 8, 2), "no eighth of the rows or columns without a sample"


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_graph_that_is_captured_after_warm_up_casts_the_weight(
    recipe: str, as_on_a_card, casts, monkeypatch: pytest.MonkeyPatch
):
    """docs/recipes.md: three steps on a side stream, then the capture.  A replay repeats the fourth step's launches."""
    layer, x, dy = fe.Linear(K, N, recipe=recipe), torch.randn(16, K, requires_grad=True), torch.randn(16, N)
    with fe.backend("reference"):
        for _ in range(3):
            layer(x).backward(dy)
        casts.clear()
        monkeypatch.setattr(weights, "capturing", lambda where: True)
        y = layer(x)
        forward = of_weight(casts)
        y.backward(dy)
        monkeypatch.setattr(weights, "capturing", lambda where: False)
    assert forward == 1
    assert fe.inspect(layer).layers[0]["kept_bytes"] == 0


@pytest.mark.parametrize("cache", ["auto", True])
def test_a_replay_that_changed_the_weight_is_seen_by_eager_code(cache, as_on_a_card, monkeypatch: pytest.MonkeyPatch):
    layer = fe.Linear(K, N, bias=False, recipe=replace(fe.current(), cache_weights=cache))
    x = torch.randn(16, K)
    monkeypatch.setattr(weights, "capturing", lambda where: True)
    layer(x).sum().backward()
    monkeypatch.setattr(weights, "capturing", lambda where: False)
    with torch.no_grad():
        before = layer(x).clone()
        layer.weight.data.mul_(2)  # what a replay of forward, backward and optimizer does: no counter moves
        assert torch.equal(layer(x), 2 * before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(256, 256), (33, 5), (7, 3), (1, 1)])
def test_a_write_into_one_element_is_seen(shape, dtype: torch.dtype):
    layer = fe.Linear(shape[1], shape[0], recipe="rowwise", dtype=dtype).eval()
    x = torch.randn(4, shape[1]).to(dtype)
    with torch.no_grad():
        layer(x)
        layer.weight.data[shape[0] // 2, shape[1] // 2] += 3
        fresh = recast_at_every_use(layer).to(dtype)
        assert torch.equal(layer(x), fresh(x))


def test_rows_that_change_places_are_seen():
    layer, x = fe.Linear(64, 64, bias=False, recipe="rowwise").eval(), torch.randn(4, 64)
    with torch.no_grad():
        before = layer(x).clone()
        layer.weight.data.copy_(layer.weight.data.flip(0))
        assert torch.equal(layer(x), before.flip(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("first", [0, 1])
def test_a_fingerprint_is_short_whatever_it_is_of(dtype: torch.dtype, first: int):
    """Less than 64 samples, the sum, the runs, and what fills no run; from an odd address too."""
    x = torch.ones(100_001).to(dtype)[first:]
    assert len(fingerprint(x)) < 64 + 2 + 256
    before = fingerprint(x)
    x.data[50_000] = 2
    assert fingerprint(x) != before


def rows_swapped(weight: torch.Tensor) -> None:
    i, j = torch.randperm(len(weight))[:2].tolist()
    weight[[i, j]] = weight[[j, i]]


def a_column_negated(weight: torch.Tensor) -> None:
    """The highest bits of 64-bit words of memory, of which an even number turns: their sum stays."""
    weight[:, 2 * int(torch.randint(weight.shape[1] // 2, ())) + 1].neg_()


def every_second_column_negated(weight: torch.Tensor) -> None:
    weight[:, 1::2].neg_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("write", [rows_swapped, a_column_negated, every_second_column_negated])
def test_writes_that_keep_the_sum_of_the_memory_are_seen(write, dtype: torch.dtype):
    layer = fe.Linear(256, 128, recipe="rowwise", dtype=dtype).eval()
    x = torch.randn(8, 256).to(dtype)
    with torch.no_grad():
        for _ in range(20):
            layer(x)
            write(layer.weight.data)
            found = layer(x)
            fe.weights_changed(layer)
            assert torch.equal(found, layer(x))


def test_training_that_writes_one_weight_in_a_hundred_through_data_is_followed():
    torch.manual_seed(0)
    mask = (torch.rand(64, 64) < 0.01).float()
    x, dy = torch.randn(16, 64), torch.randn(16, 64)
    layer = fe.Linear(64, 64, recipe="current")
    twin = recast_at_every_use(layer)
    for _ in range(6):
        for each in (layer, twin):
            each.zero_grad()
            for _ in range(2):  # microbatches, so that copies are kept
                each(x).backward(dy)
            assert each.weight.grad is not None
            each.weight.data -= 0.1 * mask * each.weight.grad
        assert torch.equal(layer(x), twin(x))


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_swapped_tensors_bring_their_own_copies(recipe: str, as_on_a_card):
    """torch refuses to swap a tensor that a weak reference knows, which the cache of its copies once held."""
    x, layer = torch.randn(16, K), fe.Linear(K, N, recipe=recipe)
    layer(x).sum().backward()
    with torch.no_grad():
        before = layer(x)  # keeps copies
        other = nn.Parameter(layer.weight.flip(0))
        torch.utils.swap_tensors(layer.weight, other)
        found = layer(x)
        fe.weights_changed(layer)
        assert torch.equal(found, layer(x))
    assert not torch.equal(found, before)
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_a_weight_that_was_read_is_saved_as_plain_values(tmp_path: Path):
    layer = fe.Linear(K, N, recipe="current")
    with torch.no_grad():
        layer(torch.randn(16, K))
    torch.save(layer.weight, tmp_path / "weight.pt")
    assert torch.equal(torch.load(tmp_path / "weight.pt", weights_only=True), layer.weight)
