"""Bytes a parameter and a token of a Llama block in training: a table of docs/performance.md, which `--write` makes.

    python -m benchmarks.per_parameter           print the table and write the result file; needs the dev extra
    python -m benchmarks.per_parameter --write   write the table into docs/performance.md too

Llama-3-8B's block at an eighth of its width, random weights, recipe `current`.  Counted is what a second block adds to
the first, without embedding and head.  Of what is saved for backward, what grows with the tokens is counted a token,
and the rest a parameter.  An element of an FP8 copy is counted as the byte that it is on a card: a CPU's emulation
holds four.
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import fp8engine as fe
from benchmarks.common import RESULTS, machine, save
from fp8engine.bench.steps import saved_bytes
from fp8engine.nn.linear import float8_modules

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
TABLE = re.compile(r"(?<=<!-- benchmarks.per_parameter -->\n).*?(?=<!-- end -->)", re.DOTALL)
WIDTH, TOKENS = 512, 256
SIZES = {"hidden_size": WIDTH, "intermediate_size": 1792, "num_attention_heads": 4, "num_key_value_heads": 1}
MODELS = {"BF16 weights": torch.bfloat16, "FP32 weights, BF16 autocast": torch.float32}
LAYERS = {"BF16": "AdamW", "FP8": "AdamW", "FP8, FP8 states": "AdamWFp8"}
PARTS = {  # of a row -> its heading
    "weights": "weights",
    "gradients": "gradients",
    "states": "optimizer states",
    "copies": "FP8 copies of weights",
    "autocast": "16-bit copies of weights",
}


def build(layers: int, dtype: torch.dtype, kind: str) -> Any:
    """A Llama of so many blocks."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(num_hidden_layers=layers, vocab_size=256, **SIZES)
    model: Any = hf.LlamaForCausalLM(config).to(dtype)
    return fe.convert(model, "current") if kind != "BF16" else model


def stored(tensors: Iterable[Any]) -> int:
    """Bytes of tensors, those that are made of others too."""
    found = 0
    for x in tensors:
        if hasattr(x, "__tensor_flatten__"):
            found += stored(getattr(x, name) for name in x.__tensor_flatten__()[0])
        else:
            found += x.nbytes
    return found


def counted(layers: int, tokens: int, dtype: torch.dtype, kind: str) -> dict[str, float]:
    """Bytes of each part of one step."""
    import torchao.optim

    model, name = build(layers, dtype, kind), LAYERS[kind]
    optimizer = getattr(torch.optim if name == "AdamW" else torchao.optim, name)(model.parameters(), lr=1e-3)
    ids = torch.arange(tokens)[None] % 256
    losses: list[torch.Tensor] = []

    def forward() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            losses.append(model(input_ids=ids, labels=ids).loss)

    found = {"saved": saved_bytes(model, forward)}
    if tokens > TOKENS:
        return found
    copies = [layer.numerics.weight.version.latest() or {} for layer in float8_modules(model)]
    found["copies"] = sum(made.data.numel() for kept in copies for made, _ in kept.values())
    losses[0].backward()
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    parameters = list(model.parameters())
    return found | {
        "parameters": sum(p.numel() for p in parameters),
        "weights": stored(parameters),
        "gradients": stored(p.grad for p in parameters),
        "states": stored(x for state in optimizer.state.values() for x in state.values()),
    }


def measure(dtype: torch.dtype, kind: str) -> dict[str, float]:
    """Bytes a parameter of each of PARTS; saved: bytes a token, block and element of its width."""
    one, two = (counted(layers, TOKENS, dtype, kind) for layers in (1, 2))
    more = [counted(layers, 2 * TOKENS, dtype, kind)["saved"] for layers in (1, 2)]
    block = {name: two[name] - one[name] for name in two}
    slope = more[1] - more[0] - block["saved"]  # of TOKENS
    row = {name: block[name] / block["parameters"] for name in ("weights", "gradients", "states", "copies")}
    row["autocast"] = (block["saved"] - slope) / block["parameters"]
    return row | {"saved": slope / TOKENS / WIDTH}


def table(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    """The rows as Markdown."""
    lines = [f"| | {' | '.join(PARTS.values())} | together | saved for backward |", "| --- " * (len(PARTS) + 3) + "|"]
    for model, kinds in rows.items():
        for kind, row in kinds.items():
            cells = [*(row[name] for name in PARTS), sum(row[name] for name in PARTS), row["saved"]]
            lines.append(f"| {model}: {kind} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines) + "\n"


def newest() -> dict[str, Any]:
    """The committed result."""
    return json.loads(max(RESULTS.glob("*/*-per_parameter.json"), key=lambda path: path.name).read_text())


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or " ").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md too")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = {model: {name: measure(dtype, name) for name in LAYERS} for model, dtype in MODELS.items()}
    print(table(rows))
    print(save("per_parameter", {"machine": machine(), "shape": SIZES, "tokens": TOKENS, "rows": rows}))
    if asked.write:
        PAGE.write_text(TABLE.sub(lambda _: table(rows), PAGE.read_text()))


if __name__ == "__main__":
    main()
