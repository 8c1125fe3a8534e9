"""The table of a run: a function of its file alone, whenever it is read.

python benchmarks/gpu.py --table FILE
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.card import records
from benchmarks.card.plan import PLAN, Group
from benchmarks.card.records import Record

BENCHES = {  # in the order of the table
    "gemm": "matmuls",
    "casts": "casts",
    "linear": "a Linear, forward and backward",
    "tuned": "a Linear, on kernels that this card's own trials chose",
    "steps": "blocks and models, forward and backward",
    "experts": "grouped matmuls of experts",
    "graphs": "eager beside a CUDA graph, and the host's time",
    "generate": "generation",
}


def text(file: Path, plan: Sequence[Group] = PLAN) -> str:
    """The machine; how each group ended; what failed; the rows of each benchmark; where kernels came from."""
    every, broken = records.read(file)
    lines = [_machine(every)]
    lines += [_state(group.name, group.what, every) for group in plan]
    lines += _failures(every, plan)
    for bench, heading in BENCHES.items():
        rows = [record["row"] for record in every if record["kind"] == "row" and record.get("bench") == bench]
        if rows:
            lines += ["", heading, *map(_shown, rows)]
    lines += _summary(every)
    lines += _notes(every)
    if broken:
        lines.append(f"{broken} lines of the file could not be read: a process was killed while it wrote them")
    return "\n".join(lines)


def line_of(name: str, file: Path) -> str:
    """How one group ended."""
    return _state(name, "", records.read(file)[0])


def failed(file: Path) -> bool:
    """Whether a check failed, a result was wrong or a group ended badly."""
    every, _ = records.read(file)
    return any(
        (record["kind"] == "check" and record.get("wrong"))
        or (record["kind"] == "row" and record["row"].get("correct") is False)
        or (record["kind"] == "end" and record["status"] == "failed")
        for record in every
    )


def _machine(every: list[Record]) -> str:
    found = next((record for record in every if record["kind"] == "machine"), None)
    if found is None:
        return "the machine is not known: the first group did not write it down"
    keys = ("card", "capability", "driver", "cuda", "torch", "triton", "python", "date", "commit")
    return " ".join(f"{key}={found[key]}" for key in keys if found.get(key) is not None)


def _state(name: str, what: str, every: list[Record]) -> str:
    mine = [record for record in every if record["group"] == name]
    ended = next((record for record in mine if record["kind"] == "end"), None)
    checks = [record for record in mine if record["kind"] == "check"]
    rows = [record["row"] for record in mine if record["kind"] == "row"]
    wrong = sum(bool(check.get("wrong")) for check in checks) + sum(row.get("correct") is False for row in rows)
    found = []
    if checks:
        found.append(f"{len(checks)} checks")
    if rows:
        found.append(f"{sum(bool(row.get('seconds')) for row in rows)} of {len(rows)} rows timed")
    if wrong:
        found.append(f"{wrong} WRONG")
    if ended is None:
        state = "runs" if any(record["kind"] == "start" for record in mine) else "not begun"
    else:
        state = f"{ended['status']}, {ended['seconds']:.0f} s" if ended["status"] != "not begun" else "not begun"
    return f"{name:10s} {state:14s} {', '.join(found) or '-':36s} {what}".rstrip()


def _failures(every: list[Record], plan: Sequence[Group]) -> list[str]:
    lines = [
        f"FAILED {record['group']}: {record['name']}: {record['wrong']}"
        for record in every
        if record["kind"] == "check" and record.get("wrong")
    ]
    for group in plan:
        mine = [record for record in every if record["group"] == group.name]
        ended = next((record for record in mine if record["kind"] == "end"), None)
        if ended and ended["status"] == "failed":
            begun = [record["what"] for record in mine if record["kind"] == "begin"]
            lines.append(f"FAILED {group.name}: {ended['why']}; it was at: {begun[-1] if begun else 'its start'}")
            lines += [f"    | {line}" for line in ended["last"]]
    return ["", *lines] if lines else []


def _shown(row: Record) -> str:
    from fp8engine.bench import harness

    try:
        return harness.line(row)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # a line of garbage must not hide the others
        return f"{row.get('name') if isinstance(row, dict) else row}: this row cannot be shown ({error!r})"


def _summary(every: list[Record]) -> list[str]:
    from benchmarks import gemm
    from fp8engine.bench import harness

    rows = [record["row"] for record in every if record["kind"] == "row" and record.get("bench") == "gemm"]
    if not rows:
        return ["", "matmuls: not measured"]
    lines = ["", "geometric mean of torch's time over ours, shapes of language models; target"]
    for name, found in gemm.summary(rows).items():
        if name == "best_tflops":
            best = f"{found['tflops']:.0f} TFLOP/s, {found['name']} {found['shape']}" if found else harness.NOT_MEASURED
            lines.append(f"{'fastest':28s} {best}")
            continue
        llm, target = found["llm"], found["target"]
        mean = llm["note"] or f"{llm['geometric_mean']:.2f}, at least {llm['minimum']:.2f}, {llm['shapes']} shapes"
        least = "" if target["minimum"] is None else f", at least {target['minimum']}"
        lines.append(f"{name:28s} {mean}; target {target['geometric_mean']}{least}")
    return lines


def _notes(every: list[Record]) -> list[str]:
    lines = [f"{record['group']}: {record['text']}" for record in every if record["kind"] == "note"]
    pack = next((record for record in every if record["kind"] == "pack"), None)
    if pack is not None:
        lines.append(f"pack: {pack['why']}" if pack.get("why") else f"pack: {pack['kernels']} kernels unpacked")
    used = [record for record in every if record["kind"] == "kernels"]
    if used:
        sums = {key: sum(record[key] for record in used) for key in ("pack", "cache", "compiled")}
        lines.append(
            f"kernels that were launched: {sums['pack']} from the pack, {sums['cache']} compiled ahead by the pool, "
            f"{sums['compiled']} compiled when they were launched"
        )
    warm = [record for record in every if record["kind"] == "warm"]
    if warm:
        made = sum(record["compiled"] for record in warm)
        lines.append(f"pool: {made} kernels compiled by {warm[0]['of']} processes")
    lost = [record for record in every if record["kind"] == "unfollowed"]
    if lost:
        lines.append(f"pool: {len({record['what'] for record in lost})} checks could not be followed without a card")
    return ["", *lines] if lines else []
