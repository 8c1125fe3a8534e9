"""Parameters of numerics/matmul_time.py, fitted to published matmuls: `python -m benchmarks.fit`, no card needed.

    loss    sum of  WIDTH^2 (sqrt(1 + (log(predicted / measured) / WIDTH)^2) - 1) / sqrt(fitted rows of its kind)

over the rows of published.json that are not kept aside (`published.is_fitted`): a square for small errors and straight
for large ones, so that no table that contradicts the others rules.  Coordinate descent from the committed values,
within BOUNDS that leave each parameter its meaning; the same every time, seconds on one core.  The values are printed,
and are put into matmul_time.py by hand, to three digits.
"""

from __future__ import annotations

import argparse
import collections
import json
import math

from benchmarks import published
from fp8engine.numerics import matmul_time

WIDTH = 0.3
SMALLEST = 0.002  # step, relative, at which a parameter is found
BOUNDS = {
    "LOOP": (0.7, 1.0),
    "LATENCY": (300, 3000),
    "STORE": (6, 80),
    "MEMORY": (0.6, 0.95),
    "FILL": (0.0, 6e-6),
    "BLEND": (2, 20),
    "CLOCK": (1.2e9, 1.9e9),
    "SLOPE": (1 / 3, 1),
    "ACTIVITY": (0.7, 1.4),
    "RESTING": (0.2, 0.6),
    "L2_OF_CARD": (3500, 12000),
    "TILE_SHARE": (0.2, 1),
    "LIBRARY": (0.5, 1),
}


def main() -> None:
    """Fit, and print each parameter beside its committed value."""
    argparse.ArgumentParser(description=(__doc__ or " ").splitlines()[0]).parse_args()
    committed = {name: getattr(matmul_time, name) for name in BOUNDS}
    before = loss(committed)
    found, after = fit(committed)
    for name, value in found.items():
        at = " (at its bound)" if value in BOUNDS[name] else ""
        print(f"{name:12s} committed {committed[name]:<10.4g} fitted {value:.4g}{at}")
    print(f"loss {before:.4f} -> {after:.4f}")


def fit(start: dict[str, float]) -> tuple[dict[str, float], float]:
    """(parameters with the least loss that is found from there, that loss)."""
    values, least = dict(start), loss(start)
    steps = dict.fromkeys(values, 0.1)
    while max(steps.values()) > SMALLEST:
        for name, (low, high) in BOUNDS.items():
            steps[name] *= 0.6
            for sign in (1, -1):
                tried = {**values, name: min(high, max(low, values[name] * (1 + sign * steps[name] / 0.6)))}
                if (its := loss(tried)) < least - 1e-9:
                    values, least = tried, its
                    steps[name] = min(0.2, steps[name] * 2.5)
                    break
    return values, least


def loss(values: dict[str, float]) -> float:
    """The loss with those parameters; the module's own are left as they were."""
    kept = {name: getattr(matmul_time, name) for name in values}
    try:
        for name, value in values.items():
            setattr(matmul_time, name, value)
        found = [row for table in TABLES for row in published.rows_of(table)]
    finally:
        for name, value in kept.items():
            setattr(matmul_time, name, value)
    count = collections.Counter(row.kind for row in found)
    return sum(
        WIDTH**2 * (math.hypot(1, math.log(row.predicted / row.measured) / WIDTH) - 1) / math.sqrt(count[row.kind])
        for row in found
    )


def _fitted(table: dict) -> dict:
    """The table without the rows that are kept aside."""
    rows = [one for one, row in zip(table["rows"], published.rows_of(table), strict=True) if row.fitted]
    return {**table, "rows": rows}


TABLES = [_fitted(table) for table in json.loads(published.TABLES.read_text())]

if __name__ == "__main__":
    main()
