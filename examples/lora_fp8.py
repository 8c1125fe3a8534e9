"""LoRA on a base stored as FP8 codes, by Hugging Face's Trainer and peft; then merged and exported for serving.

    python examples/lora_fp8.py             half a minute on a CPU; --steps 5 for a quick look
    python examples/lora_fp8.py --model DIR a 16-bit checkpoint of yours, with a tokenizer, on Python's manual

The base never has 16-bit weights in memory: they are cast to codes while they are read, one after another.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from serve_export import text, train

import fp8engine as fe

LENGTH = 64
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def windows(folder: Path) -> list[dict]:
    """Python's manual in windows of LENGTH tokens: of the folder's tokenizer, or bytes where it has none."""
    if (folder / "tokenizer_config.json").exists():
        manual = bytes(text().tolist()).decode()
        read = transformers.AutoTokenizer.from_pretrained(folder)(manual, return_tensors="pt", verbose=False)
        ids: torch.Tensor = read.input_ids[0]
    else:
        ids = text().flip(0)  # backwards: a task that the small model has not learnt
    whole = len(ids) // LENGTH * LENGTH
    return [{"input_ids": row, "labels": row} for row in ids[:whole].view(-1, LENGTH)]


def bytes_of(model: torch.nn.Module) -> int:
    """Bytes of all parameters."""
    return sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())


@torch.no_grad()
def loss_of(model: Any, rows: list[dict]) -> float:
    """Mean loss over windows."""
    ids = torch.stack([row["input_ids"] for row in rows])
    return model.eval()(input_ids=ids, labels=ids).loss.item()


def run(folder: Path, out: Path, steps: int) -> dict:
    """Load in FP8, train adapters, revert, merge, export; prints what each step leaves."""
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=fe.hf.Fp8EngineConfig("rowwise"), dtype=torch.bfloat16
    )
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found: dict = {"base bytes": bytes_of(base), "bf16 bytes": bytes_of(plain)}
    print(f"base: {found['base bytes']:,} bytes with FP8 codes, {found['bf16 bytes']:,} in BF16")
    del plain

    rows = windows(folder)
    held_out, trained = rows[:16], rows[16:]
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=PROJECTIONS))
    found["before"] = loss_of(model, held_out)
    options = transformers.TrainingArguments(
        str(out / "trainer"), max_steps=steps, per_device_train_batch_size=8, learning_rate=5e-3, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    transformers.Trainer(model, options, train_dataset=trained).train()  # pyright: ignore
    found["after"] = loss_of(model, held_out)
    print(f"loss on unseen windows: {found['before']:.3f}, after {steps} steps {found['after']:.3f}")

    merged = fe.revert(model).merge_and_unload()  # 16-bit weights again, layer by layer, and the adapters in them
    found["merged"] = loss_of(merged, held_out)
    report = fe.hf.export(merged, out / "served", "rowwise")
    found["served"] = loss_of(fe.hf.load(out / "served", dtype=torch.bfloat16), held_out)
    print(
        f"merged {found['merged']:.3f}; exported ({report.layout}, {report.bytes_after:,} bytes) {found['served']:.3f}"
    )
    return found


def main(model: Path | None = None, steps: int = 60, pretrain: int = 300) -> dict:
    """On the given checkpoint, or on a small Llama that is trained first."""
    warnings.simplefilter("ignore", fe.errors.EmulationWarning)
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        if model is None:
            model = Path(place) / "small"
            train(pretrain).save_pretrained(model)
        return run(model, Path(place), steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="LoRA on an FP8 base, merged and exported.")
    parser.add_argument("--model", type=Path, help="folder of a 16-bit checkpoint")
    parser.add_argument("--steps", type=int, default=60, help="of LoRA")
    asked = parser.parse_args()
    main(asked.model, asked.steps)
