"""fp8engine/scaling/reads.py and sample.py: what is kept of a step, of parts of layers, of bad numbers; what is
remembered; and that nothing waits for the device.
"""

import math
from typing import Any

import numpy
import pytest
import torch
from planted import normal, part_of, tried

from fp8engine.numerics.formats import E4M3
from fp8engine.numerics.recipe import OUTPUT, ROLES
from fp8engine.ops.scale_update import SLOTS
from fp8engine.scaling.histogram import LENGTH
from fp8engine.scaling.reads import (
    AVERAGED,
    COST,
    FADES_DB,
    NUMBERS,
    OPTIONS,
    READS,
    SHAPE,
    Layout,
    Reads,
    judge,
    layout_of,
    strata,
)
from fp8engine.scaling.sample import NONFINITE, StepSamples, observe

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 5, 54, 127, 128, 129, 700])
def test_what_is_kept_is_of_the_tensor(m: int, dtype: torch.dtype):
    """Whole rows, the amax of the 128 x 1 block of each of their elements, those of the columns, how many rows."""
    x = torch.randn(m, 300).to(dtype)
    part = part_of(x, "input", (260, 300))
    count = min(m, 54)
    place = strata(m, count, x.device)
    assert torch.equal(part.rows_RC[:count], x[place].float())
    assert not part.rows_RC[count:].any()
    blocks = [x[at // 128 * 128 : at // 128 * 128 + 128].abs().amax(0).float() for at in place.tolist()]
    assert torch.equal(part.blocks_RC[:count], torch.stack(blocks))
    assert torch.equal(part.columns_C, x.abs().amax(0).float())
    assert float(part.total) == m


@pytest.mark.parametrize(("size", "count"), [(1, 1), (54, 54), (700, 54), (1_000_000, 64), (65, 64)])
def test_places_are_one_in_each_equal_part(size: int, count: int):
    place = strata(size, count, torch.device("cpu"))
    parts = (place.double() + 0.5) * count / size
    assert size < 2 * count or len(set(place.tolist())) == count
    assert size != count or place.tolist() == list(range(size))
    assert 0 <= int(place.min()) <= int(place.max()) < size
    assert (parts - torch.arange(count) - 0.5).abs().max() <= 0.5 + count / size
    if size > 10 * count:  # and at another place of it each time: no period is met
        assert (parts % 1).std() > 0.2


def test_the_rows_of_a_layer_are_about_as_many_elements_whatever_its_size():
    rows = {shape: layout_of(shape, "input").rows for shape in [(64, 64), (1536, 512), (512, 1536), (9, 400)]}
    assert rows == {(64, 64): 64, (1536, 512): 16, (512, 1536): 16, (9, 400): 40}
    assert len({layout_of((1536, 512), role).rows for role in ROLES}) == 1
    assert layout_of((8, 1536, 512), "weight").energies == 8 * 1536  # of experts


def sampled(shape: tuple[int, ...], tensors: dict[str, torch.Tensor], sizes=None, device: str = "cpu"):
    samples = StepSamples(2, {1: shape}, torch.device(device))
    for role in ROLES:
        if role in tensors:
            to = samples.of(1, role)
            assert to is not None
            observe(tensors[role], to)
    return samples.finish({0: None, 1: sizes}, "grad_output" in tensors)


def layer(m: int, n: int, k: int) -> dict[str, torch.Tensor]:
    return {"input": normal(m, k), "weight": normal(n, k, seed=3), "grad_output": normal(m, n, seed=4) / m}


def test_a_step_is_judged_as_its_tensors_are():
    tensors = layer(200, 96, 160)
    found = sampled((96, 160), tensors)
    assert numpy.array_equal(found.reads[1].double().numpy(), tried(*tensors.values()).table, equal_nan=True)
    assert found.reads[0].isnan().all()  # of a layer that was not sampled
    assert math.isnan(found.loss_1)


@pytest.mark.parametrize("hard", [0, 1])
def test_the_calls_of_a_layer_share_the_rows_and_none_is_left_out(hard: int):
    """A third of one call's rows are 2^-16 of its amax and less, which E4M3 per tensor flushes: a sixth of all rows.

    Each call's per-tensor scale is its own: under the other one's all of the calm call would be flushed, half of all.
    """
    calm, spread = layer(200, 96, 160), layer(200, 96, 160)
    octaves = torch.randint(0, 25, (200, 1), generator=torch.Generator().manual_seed(1))
    spread["input"] = spread["input"] * 2.0 ** (20 - octaves)
    calls = [spread, calm][:: -1 if hard else 1]
    samples = StepSamples(2, {1: (96, 160)}, torch.device("cpu"))
    slots: list[Any] = [samples.of(1, role) for role in ROLES]
    numbers = [samples.call(1, 200) for _ in calls]
    for call, number in zip(calls, numbers, strict=True):
        observe(call["input"], slots[0], number)
        observe(call["weight"], slots[1], number)
    for call, number in reversed([*zip(calls, numbers, strict=True)]):
        observe(call["grad_output"], slots[2], number._replace(share=0.0))
    found = samples.finish({1: None}, True).reads[1]
    tensor, row = (OPTIONS.index((by, E4M3)) for by in ("tensor", "row"))
    low, flushed = (found[0, :, NUMBERS.index(name)] for name in ("low", "flushed"))
    assert low[tensor] < 12 < 25 < low[row]
    assert 0.1 < flushed[tensor] < 0.4
    assert float(samples.slots_SL[len(SLOTS), 0]) == max(float(each["input"].abs().max()) for each in calls)


@pytest.mark.parametrize(
    ("calls", "times"),
    [
        ((200, 200, 200), 3.0),
        ((196, 4), 1.0),
        ((4, 196), 1.0),
        ((180, 10, 10), 1.0),
        ((10, 10, 180), 1.0),
        ((20, 21), 0.042),
    ],
    ids=str,
)
def test_the_cost_of_several_calls(calls: tuple[int, ...], times: float):
    """Equal calls are of the same tokens, others of different ones: 41 of 200 tokens cost (41 / 200)^2 as much.

    All rows are alike: which call each is of makes no difference, but where the sample has fewer than a slot's rows.
    """
    tensors, costs = layer(200, 96, 160), []
    rows = {role: x if role == "weight" else x[:1].expand_as(x) for role, x in tensors.items()}
    for sizes in ((200,), calls):
        samples: Any = StepSamples(1, {0: (96, 160)}, torch.device("cpu"))
        for number, size in [(samples.call(0, size), size) for size in sizes]:
            for j, role in enumerate(ROLES):
                x = rows[role] if role == "weight" else rows[role][:size]
                observe(x, samples.of(0, role), number._replace(share=number.share * (j < 2)))
        costs.append(samples.finish({0: None}, True).reads[0, :2, :, COST])
    # Equal calls are summed alike: each cost and its triple are rounded to FP32 once, by 2^-24.
    torch.testing.assert_close(costs[1], times * costs[0], rtol=0.1 if len(set(calls)) > 1 else 2**-23, atol=0.0)


@pytest.mark.parametrize(("n", "k"), [(48, 160), (96, 80)], ids=["colwise", "rowwise"])
def test_of_a_layer_divided_over_ranks_its_own_part_is_judged(n: int, k: int):
    """Buffers are of the whole layer; the rank's weight is half of it."""
    tensors = layer(200, n, k)
    found = sampled((96, 160), tensors, (200, n, k)).reads[1]
    parts = []
    for role, columns, energies in zip(ROLES, (k, k, n), (0, n, 0), strict=True):
        layout = Layout(layout_of((96, 160), role).rows, columns, energies)
        flat = torch.zeros(layout.length)
        layout.write(tensors[role], flat)
        parts.append(layout.part(flat))
    torch.testing.assert_close(found, judge(*parts), rtol=0, atol=0, equal_nan=True)
    assert found[0].isfinite().all()
    close = torch.tensor(tried(*tensors.values()).table[:, :, 0]).float()  # whole: by more rows, and nearly the same
    torch.testing.assert_close(found[:, :, 0], close, rtol=0, atol=0.5)


def test_without_a_backward_the_forward_is_judged_and_has_no_cost():
    tensors = layer(200, 96, 160)
    x, w, _ = tensors.values()
    table = tried(x, w).table
    assert numpy.array_equal(table[:2, :, :COST], tried(*tensors.values()).table[:2, :, :COST])
    assert numpy.isnan(table[2:]).all()
    assert numpy.isnan(table[..., COST]).all()
    found = Reads(table)
    assert [found.seen(read) for read in range(6)] == [True, True, *[False] * 4]
    assert found.cost(0, 0) == 0
    assert not found.knows_cost(0)


@pytest.mark.parametrize("role", ROLES)
def test_of_zeros_nothing_is_known(role: str):
    """A zero-initialised layer, a gradient that has not come: neither is a cast without error."""
    tensors = layer(64, 96, 160)
    tensors[role] = torch.zeros_like(tensors[role])
    found = tried(*tensors.values())
    for read, (_, matmul) in enumerate(READS):
        touched = (role == "grad_output" and matmul != "forward") or (role == "weight" and matmul != "wgrad")
        touched |= role == "input" and matmul != "dgrad"
        assert found.seen(read) == (not touched), READS[read]
    empty = {"input": torch.zeros(0, 160), "weight": tensors["weight"] + 1, "grad_output": torch.zeros(0, 96)}
    nothing = Reads(sampled((96, 160), empty).reads[1].double().numpy())
    assert not any(nothing.seen(read) for read in range(6))
    assert not any(nothing.cost(read, 0) for read in range(6))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [(0, 0), (3, 7)])  # in a sampled row, and in none
@pytest.mark.parametrize("role", ROLES)
def test_one_bad_number_is_known_of_and_stays_in_its_layer(role: str, at: tuple[int, int], bad: float):
    """Whoever reads the step sees it in the slot's statistics, wherever it is, and drops what was judged."""
    tensors = {each: x.clone() for each, x in layer(900, 600, 160).items()}
    tensors[role][at] = bad
    found = sampled((600, 160), tensors)
    for j, each in enumerate(ROLES):
        assert (found.slots_SL[len(SLOTS) + j, NONFINITE] > 0) == (each == role)
    assert found.reads[0].isnan().all()
    if at[0] == 0:  # the first row is among the sampled ones
        read = READS.index((role, "dgrad" if role == "grad_output" else "forward"))
        assert not Reads(found.reads[1].double().numpy()).seen(read)


def remembered(db: float = 30.0, cost: float = math.nan, count: int = 1) -> Reads:
    table = numpy.full(SHAPE, db)
    table[..., COST] = cost
    return Reads(table, count)


def test_noise_fades_with_each_sample_and_comes_at_once():
    seen, values = remembered(10.0), []
    for _ in range(8):
        seen = remembered(30.0).after(seen)
        values.append(seen.value(0, 0))
    assert values == pytest.approx([min(10 + FADES_DB * i, 30) for i in range(1, 9)])
    assert remembered(30.0).after(remembered(10.0), 0.5).value(0, 0) == 10.5  # of a group that remembers for longer
    assert remembered(5.0).after(seen).value(0, 0) == 5
    words = ("the whole result", "the rows' median", "the rows' 10th percentile")
    for place, word in enumerate(words):  # which of the three numbers is the least
        seen.table[place, 1, place] = 12.0
        assert (seen.value(place, 1), seen.which(place, 1)) == (12.0, word)


def test_costs_are_averaged_over_the_latest_samples():
    seen = remembered(cost=8.0)
    for number in range(2, AVERAGED + 1):
        seen = remembered(cost=0.0).after(seen)
        assert seen.cost(0, 0) == pytest.approx(8 / number)
    for _ in range(3):  # from here on an older one fades by 1 / AVERAGED
        before, seen = seen, remembered(cost=0.0).after(seen)
        assert seen.cost(0, 0) == pytest.approx(before.cost(0, 0) * (1 - 1 / AVERAGED))


def test_what_a_sample_does_not_show_is_kept():
    """A forward without a backward after a whole step, and the other way round."""
    whole, forward = remembered(30.0, 1e-3), remembered(20.0)
    forward.table[2:] = math.nan
    found = forward.after(whole)
    assert (found.value(0, 0), found.cost(0, 0)) == (20.0, pytest.approx(1e-3))
    assert found.seen(4)
    assert found.value(4, 0) == pytest.approx(30.0)  # not better than it was: 33 without the new sample's bound
    found = whole.after(forward)
    assert found.value(0, 0) == 20.0 + FADES_DB
    assert (found.value(4, 0), found.cost(0, 0)) == (30.0, 1e-3)
    assert remembered().after(None).count == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(700, 260, 300), (3, 1000, 40), (1, 1, 1)], ids=str)
def test_nothing_waits_for_the_device(shape: tuple[int, int, int], dtype: torch.dtype):
    """A meta tensor has no numbers: whatever reads one, or branches on one, raises."""
    m, n, k = shape
    sizes = {"input": (m, k), "weight": (n, k), "grad_output": (m, n)}
    tensors = {role: torch.empty(size, dtype=dtype, device="meta") for role, size in sizes.items()}
    found = sampled((n, k), tensors, device="meta")
    assert found.reads.shape == (2, *SHAPE)
    assert {each.device.type for each in found} == {"meta"}
    assert found.slots_SL.shape == (2 * len(SLOTS), LENGTH)
    with pytest.raises(RuntimeError):
        bool(found.reads.sum() > 0)
    assert len(OPTIONS) == SHAPE[1]


def test_what_a_graph_samples_into_begins_at_16_bytes_and_has_its_length():
    """A CUDA graph of torch.compile would write to a copy of what begins elsewhere: scaling/columns.py."""
    shapes = {0: (33, 50), 1: (7, 130), 2: (129, 333)}  # of which hardly a part's length is a multiple of 4
    samples = StepSamples(len(shapes), shapes, torch.device("cpu"))
    layouts = ({**samples.layouts[i], OUTPUT: Layout(0, -1)} for i in shapes)  # of a result no rows are kept
    lengths = [layout.length for roles in layouts for layout in roles.values()]
    assert any(length % 4 for length in lengths)
    assert [len(part) for part in samples.parts] == lengths
    assert {part.data_ptr() % 16 for part in (*samples.parts, *samples.rows)} == {0}
