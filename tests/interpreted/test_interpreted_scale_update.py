"""The update of every slot in one launch, bit for bit against its twin.

Every comparison is of bits, so that NaN, the sign of zero and entries that are to be left alone count as they are.
"""

from typing import NamedTuple

import torch
from casts import MAX
from hypothesis import example, given
from hypothesis import strategies as st

from fp8engine.kernels import scale_update as kernel
from fp8engine.ops.reference.scale import FP32_MAX
from fp8engine.ops.reference.scale import scale_update as twin

NAN, INF = float("nan"), float("inf")
# Around the tiles of 64 rows and 32 slots, and around both at once.
ROWS = [1, 2, 3, 16, 17, 63, 64, 65, 131]
SLOTS = [0, 1, 2, 31, 32, 33, 64, 97]
ODD = torch.tensor([0.0, -0.0, 2.0**-149, 2.0**-126, FP32_MAX, INF, NAN, -INF, -1.0, 1.0, 448.0])


class Tables(NamedTuple):
    """What an update takes: history [H, S], live [2, S], rules [3, S]."""

    history: torch.Tensor
    live: torch.Tensor
    rules: torch.Tensor

    def copy(self) -> "Tables":
        return Tables(*(x.clone() for x in self))


def numbers(shape: tuple[int, int], odd: float, make: torch.Generator) -> torch.Tensor:
    """Amaxes over nearly all of FP32's range, a share of them odd."""
    x = torch.exp2(torch.randint(-140, 120, shape, generator=make).float()) * (1 + torch.rand(shape, generator=make))
    picked = ODD[torch.randint(0, len(ODD), shape, generator=make)]
    return torch.where(torch.rand(shape, generator=make) < odd, picked, x)


def tables_of(rows: int, slots: int, odd: float = 0.0, idle: float = 0.3, seed: int = 0) -> Tables:
    """Tables with a share of odd numbers and of slots that did not run."""
    make = torch.Generator().manual_seed(seed)
    live = numbers((2, slots), odd, make)
    live[0] = torch.where(torch.rand(slots, generator=make) < idle, -1.0, live[0])
    numerators = torch.tensor([0.0, 2.0**-30, 3e38, *MAX.values(), 448.0 / 8])
    rules = torch.stack(
        [
            numerators[torch.randint(0, len(numerators), (slots,), generator=make)],
            torch.randint(0, rows + 3, (slots,), generator=make).float(),  # longer than the table: all of it
            torch.randint(0, 2, (slots,), generator=make).float(),
        ]
    )
    return Tables(numbers((rows, slots), odd, make), live, rules)


def assert_bits(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    differ = torch.nonzero(found.contiguous().view(torch.int32) != wanted.contiguous().view(torch.int32))
    if len(differ):
        at = tuple(differ[0].tolist())
        raise AssertionError(f"{what}: {len(differ)} differ; at {at} {found[at]}, want {wanted[at]}")


def assert_as_twin(found: Tables, before: Tables) -> None:
    wanted = before.copy()
    twin(*wanted)
    for table in ("history", "live", "rules"):
        assert_bits(getattr(found, table), getattr(wanted, table), table)


@given(
    st.sampled_from(ROWS), st.sampled_from(SLOTS), st.sampled_from([0.0, 0.1, 0.6]), st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 999),
)  # fmt: skip
@example(1024, 33, 0.1, 0.3, 0)
@example(1, 1, 0.6, 0.0, 3)
@example(65, 97, 0.6, 0.3, 4)
def test_bit_for_bit(rows, slots, odd, idle, seed):
    tables = tables_of(rows, slots, odd, idle, seed)
    before = tables.copy()
    kernel.scale_update(*tables)
    assert_as_twin(tables, before)


@given(st.integers(0, 999), st.sampled_from([(3, 5), (16, 40), (70, 33)]))
def test_tables_of_any_strides(seed, shape):
    dense = tables_of(*shape, odd=0.2, seed=seed)
    spread = Tables(*(torch.full((2 * x.shape[0] + 1, 3 * x.shape[1] + 2), 7.0)[1::2, 2::3] for x in dense))
    turned = Tables(*(x.t().contiguous().t() for x in dense))
    for tables in (spread, turned):
        for into, x in zip(tables, dense, strict=True):
            into.copy_(x)
        assert shape[0] < 4 or not tables.history.is_contiguous()
        kernel.scale_update(*tables)
        assert_as_twin(tables, dense)
    assert (spread.history._base[0::2] == 7).all()  # what lies between is not theirs
    assert (spread.history._base[:, 0::3] == 7).all()
    assert (spread.live._base[:, 1::3] == 7).all()
