"""A changed weight is seen by the next forward, also where no version counter moves: on a CPU by sampled values.

`as_on_a_card` takes the samples away: there, reading one would wait for the device.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import storing
from support import DTYPES, FP8_RECIPES, converted, numerics_of, same
from torch import nn
from torch.func import functional_call
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
    return sum(shape in ((N, K), (K, N)) for _, shape in casts)


def train(layer: Any, x: torch.Tensor, steps: int = 12) -> list[float]:
    """Losses of steps of gradient descent that write `p.data`, as many optimizers of other people do."""
    target, losses = x[:, 1:2].expand(-1, 8), []
    for _ in range(steps):
        layer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        for p in layer.parameters():
            p.data -= 0.05 * p.grad
        losses.append(loss.item())
    return losses


def recast_at_every_use(layer: nn.Linear) -> fe.Linear:
    """The same layer, which keeps no copy of its weight."""
    sizes, dtype, bias = (layer.in_features, layer.out_features), layer.weight.dtype, layer.bias is not None
    twin = fe.Linear(*sizes, bias, recipe=numerics_of(layer).recipe, dtype=dtype)
    twin.load_state_dict(layer.state_dict())
    numerics_of(twin).weight.cache = False
    return twin


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_a_square_weight_that_is_read_transposed_has_no_copy_of_the_other_order(recipe: str):
    """Of one memory and one version: only the strides tell W from its transpose."""
    layer, plain = fe.Linear(64, 64, bias=False, recipe=recipe), nn.Linear(64, 64, bias=False)
    w, x = torch.randn(64, 64, requires_grad=True), torch.randn(8, 64)
    found = []
    for each in (layer, plain):
        h = functional_call(each, {"weight": w}, (x,))
        y = functional_call(each, {"weight": w.t()}, (h,))
        found.append((y, *torch.autograd.grad(y.square().sum(), w)))
    for ours, theirs in zip(*found, strict=True):  # E5M2 keeps dy to 2^-3, a weight of the other order is off by 1
        assert (ours - theirs).norm() < 0.2 * theirs.norm()
    with torch.no_grad():
        for _ in range(2):
            layer(x)
        layer.weight.data = layer.weight.data.t()
        assert same(layer(x), recast_at_every_use(layer)(x))


def test_a_weight_with_gaps_that_is_written_through_data_is_cast_again():
    layer, x = fe.Linear(64, 64, recipe="current"), torch.randn(8, 64)
    layer.weight.data = torch.randn(64, 192)[:, 64:128]
    with torch.no_grad():
        layer.weight.add_(0)  # its counter has moved, as after a step of an optimizer
        for _ in range(2):
            layer(x)
        layer.weight.data.copy_(torch.randn(64, 64))
        assert same(layer(x), recast_at_every_use(layer)(x))


CHANGES: dict[str, Callable] = {
    "an optimizer": lambda layer: torch.optim.SGD([layer.weight], lr=0.5).step(),  # its gradient is of ones
    "load_state_dict": lambda layer: layer.load_state_dict({"weight": layer.weight * 2, "bias": layer.bias}),
    "data": lambda layer: layer.weight.data.mul_(2),
    "data of another tensor": lambda layer: setattr(layer.weight, "data", layer.weight.data * 2),
    "in place": lambda layer: layer.weight.detach()[3, 5].add_(100),
    "init": lambda layer: nn.init.xavier_uniform_(layer.weight),
    "a new parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach() * 2)),
    "a dtype": lambda layer: layer.bfloat16().float(),  # rounds every weight, through .data
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("recipe", ["current", "rowwise", "blockwise"])
def test_a_changed_weight_is_seen_by_the_next_forward(recipe: str, change: str):
    layer, x = fe.Linear(K, N, recipe=recipe), torch.randn(6, K)
    before = layer(x)
    layer.weight.grad = torch.ones_like(layer.weight)
    CHANGES[change](layer)
    after = layer(x)
    assert torch.equal(after, recast_at_every_use(layer)(x))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("seen", ["by its values", "on a card"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_an_optimizer_that_writes_data_is_followed(recipe: str, seen: str, request: pytest.FixtureRequest):
    """A feature is always zero, like MNIST's first pixels: a column of zero gradients."""
    if seen == "on a card":
        request.getfixturevalue("as_on_a_card")
    x, layer = torch.randn(64, 784), fe.Linear(784, 8, recipe=recipe)
    x[:, 0] = 0
    assert layer.weight._version > 0, "its counter stands still, but not at 0"
    twin = recast_at_every_use(layer)
    losses = train(layer, x)
    assert losses == train(twin, x)
    assert losses[-1] < 0.9 * losses[0], "the exact value is the twin's; without learning it stays at the first"


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


@pytest.mark.parametrize("told", [True, False], ids=["told", "by its values"])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_weights_changed_casts_again(recipe: str, kind: str, told: bool, request: pytest.FixtureRequest):
    """A Conv1D's weight is a transposed view."""
    model = converted(nn.Sequential(nn.Linear(K, N) if kind == "linear" else Conv1D(N, K)), recipe).eval()
    if told:
        request.getfixturevalue("as_on_a_card")
    x = torch.randn(6, K)
    with torch.no_grad():
        model[0].bias.zero_()
        before = model(x).clone()
        model[0].weight.data.mul_(2)
        if told:
            fe.weights_changed(model)
        # Doubling is exact in every format and moves every scale by a power of two.
        assert torch.equal(model(x), 2 * before)


def test_weights_changed_refuses_a_model_that_is_not_converted():
    with pytest.raises(fe.errors.ConversionError, match=r"Sequential has no converted layers; call fe\.convert first"):
        fe.weights_changed(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(fe.errors.ConversionError, match=r"weights_changed takes an nn\.Module, not int"):
        fe.weights_changed(3)  # pyright: ignore[reportArgumentType]


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
    for places, size in (((found // k).unique(), n), ((found % k).unique(), k)):
        assert len(places) >= min(size, 20)
        gaps = torch.diff(torch.cat([torch.tensor([-1]), places, torch.tensor([size])]))
        assert gaps.max() <= max(size // 8, 2), "no eighth of the rows or columns without a sample"


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Begins and ends what a weight takes for the capture of a CUDA graph."""
    return lambda on: monkeypatch.setattr(weights, "capturing", lambda where: on)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_graph_that_is_captured_after_warm_up_casts_the_weight(recipe: str, as_on_a_card, casts, capture):
    """docs/recipes.md: three steps on a side stream, then the capture.  A replay repeats the fourth step's launches."""
    layer, x, dy = fe.Linear(K, N, recipe=recipe), torch.randn(16, K, requires_grad=True), torch.randn(16, N)
    with fe.backend("reference"):
        for _ in range(3):
            layer(x).backward(dy)
        casts.clear()
        capture(True)
        y = layer(x)
        assert of_weight(casts) == 1
        y.backward(dy)
        capture(False)
    assert fe.inspect(layer).layers[0]["kept_bytes"] == 0


@pytest.mark.parametrize("cache", ["auto", True])
def test_a_replay_that_changed_the_weight_is_seen_by_eager_code(cache, as_on_a_card, capture):
    layer = fe.Linear(K, N, bias=False, recipe=replace(fe.current(), cache_weights=cache))
    x = torch.randn(16, K)
    capture(True)
    layer(x).sum().backward()
    capture(False)
    with torch.no_grad():
        before = layer(x).clone()
        layer.weight.data.mul_(2)  # what a replay of forward, backward and optimizer does: no counter moves
        assert torch.equal(layer(x), 2 * before)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.int8])
@pytest.mark.parametrize("first", [0, 1])
def test_a_fingerprint_is_short_whatever_it_is_of(dtype: torch.dtype, first: int):
    """Less than 64 samples, the sum, the runs, and what fills no run; from an odd address too."""
    x = torch.ones(100_001).to(dtype)[first:]
    assert len(fingerprint(x)) < 64 + 2 + 256
    before = fingerprint(x)
    x.data[50_000] = 2
    assert fingerprint(x) != before


@pytest.mark.parametrize("size", [1, 255, 256, 1000])
def test_memory_can_be_resized_after_its_fingerprint(size: int):
    """fully_shard frees and takes back a weight's memory at each step, which NumPy would forbid for ever."""
    for dtype in (*DTYPES, torch.int8):
        x = torch.ones(size).to(dtype)
        fingerprint(x)
        x.untyped_storage().resize_(0)


def one_element(weight: torch.Tensor) -> None:
    weight[weight.shape[0] // 2, weight.shape[1] // 2] += 3


def rows_swapped(weight: torch.Tensor) -> None:
    i, j = torch.randperm(len(weight))[:2].tolist()
    weight[[i, j]] = weight[[j, i]]


def a_column_negated(weight: torch.Tensor) -> None:
    """The highest bits of 64-bit words of memory, of which an even number turns: their sum stays."""
    weight[:, 2 * int(torch.randint(weight.shape[1] // 2, ())) + 1].neg_()


def every_second_column_negated(weight: torch.Tensor) -> None:
    weight[:, 1::2].neg_()


WRITES = [rows_swapped, a_column_negated, every_second_column_negated]
CASES = [(write, (128, 256)) for write in WRITES] + [(one_element, shape) for shape in ((256, 256), (33, 5), (1, 1))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("write", "shape"), CASES)
def test_writes_of_one_element_and_that_keep_the_sum_of_the_memory_are_seen(write, shape, dtype: torch.dtype):
    layer = fe.Linear(shape[1], shape[0], recipe="rowwise", dtype=dtype).eval()
    x = torch.randn(8, shape[1]).to(dtype)
    with torch.no_grad():
        for _ in range(20):
            layer(x)
            write(layer.weight.data)
            assert torch.equal(layer(x), recast_at_every_use(layer)(x))


def test_a_weight_that_was_read_is_saved_as_plain_values(tmp_path: Path):
    layer = fe.Linear(K, N, recipe="current")
    with torch.no_grad():
        layer(torch.randn(16, K))
    torch.save(layer.weight, tmp_path / "weight.pt")
    assert torch.equal(torch.load(tmp_path / "weight.pt", weights_only=True), layer.weight)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def of_layers(recipe: Any) -> Any:
    return converted(two_layers(), recipe, skip=lambda *_: False)


def gradients(model: nn.Module, steps: int = 4) -> list[torch.Tensor]:
    """Gradients of every step; inputs always the same, and growing."""
    generator, found = torch.Generator().manual_seed(1), []
    for step in range(steps):
        y = model(torch.randn(8, 32, generator=generator) * 1.5**step)
        found += torch.autograd.grad(y.square().mean(), list(model.parameters()))
    return found


@pytest.fixture
def swapping() -> Iterator[None]:
    """torch exchanges a parameter's contents where it would write `.data`."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_swapped_parameters_move_and_load(recipe: str, assign: bool, swapping):
    """swap_tensors refuses a parameter with a weak reference, by which a copy of it knows what it was made of."""
    model, twin = (of_layers(recipe) for _ in range(2))
    gradients(model, 1)
    with torch.no_grad():
        model(torch.randn(8, 32))  # copies are kept from here on
    model.double().float()
    model.load_state_dict(twin.state_dict(), assign=assign)
    x = torch.randn(8, 32)
    with torch.no_grad():
        fe.weights_changed(twin)
        if recipe != "delayed":  # whose scales come from the step that twin has not made
            assert torch.equal(model(x), twin(x))


def test_a_weight_that_moves_leaves_no_copy_behind():
    layer = fe.Linear(32, 32, recipe="current")
    with torch.no_grad():
        layer(torch.randn(8, 32))
    copies = weakref.ref(numerics_of(layer).weight.kept)
    assert len(numerics_of(layer).weight.kept) == 1
    layer.bfloat16()
    assert copies() is None, "the codes of the weight in FP32 (on a card: on the card) wait for a next forward"


@pytest.mark.parametrize("recipe", [*FP8_RECIPES, "auto", pytest.param(storing(), id="stored")])
def test_a_model_converted_in_inference_mode_trains(recipe):
    """As torch's do: the tables are no inference tensors, which nothing may write outside of that mode."""
    model, usual = two_layers(), of_layers(recipe)
    with torch.inference_mode():
        converted(model, recipe, skip=lambda *_: False)
    assert same(gradients(model), gradients(usual))


def test_a_model_that_moves_to_its_device_in_inference_mode_trains():
    """Loaded after conversion on the meta device, and first run in inference mode, where tables follow the weights."""
    with torch.device("meta"):
        model = of_layers(storing())
    model.load_state_dict(two_layers().state_dict(), assign=True)
    usual = of_layers(storing())
    for each in (model, usual):
        with torch.inference_mode():
            each(torch.randn(8, 32, generator=torch.Generator().manual_seed(2)))
    assert same(gradients(model), gradients(usual))
