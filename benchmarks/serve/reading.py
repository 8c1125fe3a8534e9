"""lm-eval's bits per byte of an export, read by fe.hf.load and by transformers with compressed-tensors, both in FP32.

compressed-tensors computes its casts in the model's dtype: under BF16 its scales and quotients are rounded to 8 bits.
In FP32, under a recipe with exact scales, both have one formula, but not one order of roundings: x / (amax / 448)
there, x * (448 / amax) here, and other FP32 sums.  So the reading is taken apart:

    layers     each of ours on the input that theirs had: the same but for values on a rounding boundary
    whole      bits per byte, document by document
    by itself  theirs with an embedding 1 + 2^-20 times as large: what FP8 casts make of FP32's last bits
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch

import fp8engine as fe
from benchmarks.serve.judge import paired, row

PIECE = 600  # characters of a document
NUDGE = 1 + 2.0**-20
BOUNDARY = 1e-3  # relative difference of a layer's result; another formula of the scale has 1e-2 and more


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


def bits_per_byte(model: Any, tokenizer: Any, task: Path) -> tuple[float, list[float]]:
    """What lm-eval finds for the task, and for each document."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=256, device="cpu")
    tasks = TaskManager(include_path=str(task), include_defaults=False)
    found = simple_evaluate(model=wrapped, tasks=["manual"], task_manager=tasks, bootstrap_iters=0)
    samples = [sample["bits_per_byte"] for sample in found["samples"]["manual"]]
    ln2 = torch.tensor(2.0).log().item()
    return found["results"]["manual"]["bits_per_byte,none"], [-nats / size / ln2 for nats, size in samples]


@torch.no_grad()
def layers_apart(ours: Any, theirs: Any, ids_BT: torch.Tensor) -> dict[str, float]:
    """Of each served layer: relative difference of its result to theirs, on the input that theirs had."""
    found: dict[str, float] = {}

    def compare(name: str, layer: torch.nn.Module) -> Any:
        def hook(_: Any, inputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
            found[name] = ((layer(inputs[0]) - y).norm() / y.norm()).item()

        return hook

    served = {name: layer for name, layer in ours.named_modules() if hasattr(layer, "scale_name")}
    hooks = [theirs.get_submodule(name).register_forward_hook(compare(name, layer)) for name, layer in served.items()]
    theirs(ids_BT)
    for hook in hooks:
        hook.remove()
    return found


def both(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The models that fe.hf.load and transformers make of an export."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return fe.hf.load(folder, dtype=dtype), theirs


def lm_eval_rows(folder: Path, model: Any, tokenizer: Any, text: str) -> list[dict]:
    """Rows of a model's export under exact scales per row, read by both in FP32; layers also in BF16 and `rowwise`."""
    task = write_task(text, folder / "task")
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :256]
    fe.hf.export(model, folder / "powers", "rowwise")
    fe.hf.export(model, folder / "exact", fe.rowwise(power_of_2=False))
    other = {
        "exact scales, in BF16": layers_apart(*both(folder / "exact", torch.bfloat16), ids),
        "scales that are powers of two, in FP32": layers_apart(*both(folder / "powers", torch.float32), ids),
    }
    ours, theirs = both(folder / "exact", torch.float32)
    apart = layers_apart(ours, theirs, ids)
    differ = sum(
        int((theirs.get_submodule(name).weight != ours.get_submodule(name).dequantize()).sum()) for name in apart
    )
    largest = max(apart.values())
    found = {
        "the model in BF16": bits_per_byte(model, tokenizer, task),
        "fe.hf.load": bits_per_byte(ours, tokenizer, task),
        "transformers": bits_per_byte(theirs, tokenizer, task),
    }
    theirs.get_input_embeddings().weight.data.mul_(NUDGE)
    found["transformers, embedding 1 + 2^-20 times"] = bits_per_byte(theirs, tokenizer, task)
    (_, ours_each), (_, theirs_each), (_, nudged_each) = list(found.values())[1:]
    less = {
        "load": paired(ours_each, theirs_each),
        "transformers, embedding 1 + 2^-20 times,": paired(nudged_each, theirs_each),
    }
    same = f"{found['fe.hf.load'][0]:.4f}" == f"{found['transformers'][0]:.4f}"
    return [
        row("weights that transformers reads otherwise", differ, "0", differ == 0),
        row(
            f"layers on the same input, of {len(apart)}: largest difference", largest, f"<= {BOUNDARY}",
            largest <= BOUNDARY, above_1e_6={name: found for name, found in apart.items() if found > 1e-6},
        ),
        *(
            row(f"layers on the same input, {name}: median", statistics.median(each.values()), "", None, each=each)
            for name, each in other.items()
        ),
        *(row(f"lm-eval, bits per byte, {name}", value, "", None, each=each) for name, (value, each) in found.items()),
        row("lm-eval: the same four decimals", same, "the same", same),
        *(row(f"lm-eval, {name} less transformers", f"{m:+.4f} ± {e:.4f}", "", None) for name, (m, e) in less.items()),
    ]  # fmt: skip
