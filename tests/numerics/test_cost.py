"""The cost model where its numbers are known."""

import pytest

from fp8engine.numerics.cost import CASTS, RHO, break_even, speedup


@pytest.mark.parametrize("casts", CASTS)
def test_break_even_is_where_nothing_is_won(casts: str):
    n = break_even(casts)
    assert speedup(n, n, n, casts) == pytest.approx(1.0)  # type: ignore[arg-type]
    assert speedup(2 * n, 2 * n, 2 * n, casts) > 1.0  # type: ignore[arg-type]
    assert speedup(10**9, 10**9, 10**9, casts) == pytest.approx(RHO, rel=1e-4)
