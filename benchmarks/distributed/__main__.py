"""Every part of the table of distributed training, on 2 and 4 gloo processes of this machine: `make distributed`.

Times are not measured: gloo on one CPU says nothing of NVLink.  Bytes and equality are the same on any machine.
"""

from __future__ import annotations

import json
import sys
import time

from benchmarks import common
from benchmarks.distributed import experts, fsdp, gradients, plan, tensor_parallel

PARTS = {
    "fsdp": fsdp,
    "tensor_parallel": tensor_parallel,
    "experts": experts,
    "gradients": gradients,
    "plan": plan,
}


def main(names: list[str]) -> None:
    """Print the rows of the parts that are named, of all where none is; write all rows of a whole run."""
    rows = []
    for name in names or PARTS:
        start = time.perf_counter()
        found = PARTS[name].rows()
        rows += found
        print(f"\n{name} ({time.perf_counter() - start:.0f} s)")
        print(f"{'recipe':14} {'ranks':>5}  {'option':34} {'equal':6} {'of BF16 bytes':>13}  error; note")
        for row in found:
            share = "" if row["bytes_share"] is None else f"{row['bytes_share']:.3f}"
            equal = {True: "yes", False: "no", None: ""}[row["equal"]]
            words = "; ".join(filter(None, (row["error"], row["note"])))
            print(f"{row['recipe']:14} {row['ranks']:5}  {row['option']:34} {equal:6} {share:>13}  {words}", flush=True)
    if names:
        return
    rows = [{key: value for key, value in row.items() if key not in ("losses", "graphs", "changes")} for row in rows]
    path = common.save("distributed", {"what": "distributed", "machine": common.machine(), "rows": rows})
    print(f"\n{path}: {len(json.dumps(rows))} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
