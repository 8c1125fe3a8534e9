"""lm-eval's bits per byte of an export, read by fe.hf.load and by transformers with compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import fp8engine as fe

PIECE = 600  # characters of a document


def write_task(text: str, folder: Path) -> Path:
    """A task of lm-eval and its documents, as files of a new folder."""
    folder.mkdir()
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    task = {
        "task": "manual",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "text.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    }
    (folder / "manual.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


def bits_per_byte(model: Any, tokenizer: Any, task: Path) -> float:
    """What lm-eval finds for the task."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=256, device="cpu")
    tasks = TaskManager(include_path=str(task), include_defaults=False)
    found = simple_evaluate(model=wrapped, tasks=["manual"], task_manager=tasks, bootstrap_iters=0)
    return found["results"]["manual"]["bits_per_byte,none"]


def lm_eval_rows(model: Any, tokenizer: Any, text: str, folder: Path) -> list[dict]:
    """Bits per byte of the model in BF16 and of its two readings, and how many decompressed weights differ."""
    import transformers

    task = write_task(text, folder / "task")
    fe.hf.export(model, folder / "read", "rowwise")
    served = fe.hf.load(folder / "read", dtype=torch.bfloat16)
    read = transformers.AutoModelForCausalLM.from_pretrained(folder / "read", dtype=torch.bfloat16)
    found = {
        "BF16": bits_per_byte(model, tokenizer, task),
        "fe.hf.load": bits_per_byte(served, tokenizer, task),
        "transformers": bits_per_byte(read, tokenizer, task),
    }
    theirs = dict(read.named_modules())
    differ = sum(
        int((theirs[name].weight.float() != (layer.weight.float() * layer.scale).to(torch.bfloat16).float()).sum())
        for name, layer in served.named_modules()
        if hasattr(layer, "scale_name")
    )
    rows = [
        {"what": f"lm-eval, bits per byte, {name}", "value": v, "target": "", "met": None} for name, v in found.items()
    ]
    same = f"{found['fe.hf.load']:.4f}" == f"{found['transformers']:.4f}"
    return [
        *rows,
        {"what": "lm-eval: the same digits", "value": same, "target": "the same", "met": same},
        {"what": "weights that transformers reads otherwise", "value": differ, "target": "0", "met": differ == 0},
    ]
