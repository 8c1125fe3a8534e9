"""What keys and values in E4M3 cost SmolLM2: greedy tokens beside the 16-bit cache's, divergence, bytes.

    python benchmarks/kv_cache.py [--dtype bf16 fp32] [--prompts 64] [--prompt-tokens 128] [--tokens 64]
                                  [--blocks 1 16 32 64 128] [--batch 16] [--text] [--json]

The reference is the same model with its keys and values in BF16 (an FP32 model's are rounded when they are kept).
Prompts are Python's manual, spread over all of it.  Each cache starts from the reference's prompt, and reads

    given      the reference's tokens: share of positions with the same most likely token, and the divergence
               KL(reference || cache) of the next token, its mean and standard error over prompts
    free       its own tokens: share that are the reference's at that place, share of prompts without any other; after
               its first other token a text is another text

With --text every cache reads the manual itself on, instead of what the reference writes: share of positions with the
reference's most likely token, and the loss of the manual's next token, paired with the reference's (± over prompts).

"per tensor" is transformers' own FP8 cache: one scale for a layer's keys and one for its values, from the prompt.
"fp32" is an FP32 model's own cache: what rounding to BF16 does by itself.
Prompts are seen as they came, by every cache, and rounded to BF16 before they are cast; E4M3 is read from the first new
token on.  FP8 is emulated on a CPU.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import machine, parser, save
from real_models import load
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, QuantizedCache

import fp8engine as fe

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
REFERENCE = "bf16"
Make = Callable[[], Cache]


class RoundedLayer(DynamicLayer):
    """Keys and values as a 16-bit cache keeps them, whatever the model's dtype."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """This call's own keys and values as they came, those of earlier calls rounded to BF16."""
        found = super().update(key_states, value_states)
        self.keys, self.values = (part.bfloat16().to(part.dtype) for part in found)
        return found


def caches(config: Any, dtype: str, blocks: Sequence[int]) -> dict[str, Make]:
    """An empty cache of each kind."""
    found: dict[str, Make] = {REFERENCE: lambda: Cache(layer_class_to_replicate=RoundedLayer)}
    if dtype == "fp32":
        found["fp32"] = DynamicCache
    found["per tensor"] = lambda: QuantizedCache("fp8", config)
    return found | {f"block {block}": lambda block=block: fe.hf.Fp8Cache(config, block) for block in blocks}


def bytes_of(cache: Cache, elements: int) -> int:
    """Bytes kept between steps.  elements: of all keys and values."""
    if isinstance(cache, QuantizedCache):
        return elements + 2 * 4 * len(cache.layers)
    return cache.nbytes if isinstance(cache, fe.hf.Fp8Cache) else 4 * elements


class Run:
    """A batch with a cache, token by token."""

    def __init__(self, model: nn.Module, make: Make):
        self.model, self.cache, self.seconds = model, make(), 0.0

    def read(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [B, vocabulary] of the token after these."""
        start = time.perf_counter()
        logits_BV = self.model(ids_BT, past_key_values=self.cache, logits_to_keep=1).logits[:, -1]
        self.seconds += time.perf_counter() - start
        return F.log_softmax(logits_BV.float(), -1)

    def starting_from(self, prompt: Any) -> Run:
        """Itself, its cache holding the prompt's keys and values as they came."""
        for i, layer in enumerate(prompt.layers):
            self.cache.update(layer.keys, layer.values, i)
        return self


class Compared:
    """One cache beside the reference: a given and a free run of one batch, and what each token showed."""

    def __init__(self, model: nn.Module, make: Make, prompt: Any):
        self.given, self.free = (Run(model, make).starting_from(prompt) for _ in range(2))
        self.found: dict[str, list[torch.Tensor]] = {"agreed": [], "divergence": [], "same": []}

    def step(self, ids_B1: torch.Tensor, wanted_BV: torch.Tensor) -> None:
        """The reference has read `ids` and expects `wanted`."""
        best_B = wanted_BV.argmax(-1)
        found_BV = self.given.read(ids_B1)
        own_B1 = self.free.read(self.own_B1 if self.found["same"] else ids_B1).argmax(-1, keepdim=True)
        self.own_B1 = own_B1
        self.found["agreed"].append(found_BV.argmax(-1) == best_B)
        self.found["divergence"].append(F.kl_div(found_BV, wanted_BV, reduction="none", log_target=True).sum(-1))
        self.found["same"].append(own_B1[:, 0] == best_B)


def batch(model: nn.Module, made: dict[str, Make], prompt_BT: torch.Tensor, tokens: int) -> dict[str, dict]:
    """Of each cache [B, tokens] of `agreed`, `divergence` and `same`; bytes kept at the end, and seconds."""
    reference = Run(model, made[REFERENCE])
    token_B1 = reference.read(prompt_BT).argmax(-1, keepdim=True)
    kept: Any = reference.cache
    reference.seconds = 0.0
    beside = {name: Compared(model, make, kept) for name, make in made.items() if name != REFERENCE}
    for _ in range(tokens):
        wanted_BV = reference.read(token_B1)
        for each in beside.values():
            each.step(token_B1, wanted_BV)
        token_B1 = wanted_BV.argmax(-1, keepdim=True)
    elements = sum(layer.keys.numel() + layer.values.numel() for layer in kept.layers)
    rows: dict[str, dict] = {REFERENCE: {"bytes": 2 * elements, "seconds": reference.seconds}}
    for name, each in beside.items():
        rows[name] = {key: torch.stack(part, 1) for key, part in each.found.items()}
        rows[name] |= {"bytes": bytes_of(each.given.cache, elements), "seconds": each.given.seconds}
    return rows


def text_batch(model: nn.Module, made: dict[str, Make], ids_BT: torch.Tensor, tokens: int) -> dict[str, dict]:
    """Of each cache [B, tokens] of `agreed` and `loss` (nats) over the last tokens of a text."""
    reference = Run(model, made[REFERENCE])
    reference.read(ids_BT[:, : -tokens - 1])
    others = {name: make for name, make in made.items() if name != REFERENCE}
    runs = {name: Run(model, make).starting_from(reference.cache) for name, make in others.items()}
    runs[REFERENCE] = reference
    found: dict[str, dict] = {name: {"agreed": [], "loss": []} for name in runs}
    for at in range(-tokens - 1, -1):
        each = {name: run.read(ids_BT[:, at, None]) for name, run in runs.items()}
        for name, log_BV in each.items():
            found[name]["agreed"].append(log_BV.argmax(-1) == each[REFERENCE].argmax(-1))
            found[name]["loss"].append(-log_BV.gather(1, ids_BT[:, at + 1, None])[:, 0])
    return {name: {key: torch.stack(part, 1) for key, part in both.items()} for name, both in found.items()}


def text_row(name: str, dtype: str, parts: list[dict], base: list[dict]) -> dict:
    """One cache's batches of --text as a row of the result.  base: the reference's."""
    agreed_BT, loss_BT, base_BT = (
        torch.cat([part[key] for part in of]) for of, key in ((parts, "agreed"), (parts, "loss"), (base, "loss"))
    )
    error = lambda each_B: each_B.std().item() / math.sqrt(len(each_B))  # noqa: E731 - of a mean over prompts
    agreed_B, more_B = agreed_BT.float().mean(1), (loss_BT - base_BT).mean(1)
    return {
        "cache": name,
        "model": dtype,
        "agreed": agreed_B.mean().item(),
        "agreed_error": error(agreed_B),
        "perplexity": loss_BT.mean().exp().item(),
        "perplexity_bf16": base_BT.mean().exp().item(),
        "more_loss": more_B.mean().item(),
        "more_loss_error": error(more_B),
        "more_loss_each": more_B.tolist(),
    }


def text_table(result: dict) -> Table:
    """The result of --text as a table for a terminal."""
    what = f"{result['prompts']} texts, {result['prompt_tokens']} tokens before and {result['tokens']} read one by one"
    shown = Table("model", "cache", "same token", "perplexity", "of BF16's cache", "more loss, millinats", title=what)
    for row in result["rows"]:
        more = f"{1e3 * row['more_loss']:+.2f} ± {1e3 * row['more_loss_error']:.2f}"
        agreed = f"{row['agreed']:.1%} ± {row['agreed_error']:.1%}"
        both = (f"{row[key]:.3f}" for key in ("perplexity", "perplexity_bf16"))
        shown.add_row(row["model"], row["cache"], agreed, *both, more)
    return shown


def row(name: str, dtype: str, parts: list[dict], base: list[dict]) -> dict:
    """One cache's batches as a row of the result.  base: the reference's."""
    agreed, divergence, same = (torch.cat([part[key] for part in parts]) for key in ("agreed", "divergence", "same"))
    each = divergence.mean(1).tolist()
    ratio = {key: sum(part[key] for part in parts) / sum(part[key] for part in base) for key in ("bytes", "seconds")}
    return {
        "cache": name,
        "model": dtype,
        "agreed": agreed.float().mean().item(),
        "agreed_error": agreed.float().mean(1).std().item() / math.sqrt(len(agreed)),
        "kl": statistics.fmean(each),
        "kl_error": statistics.stdev(each) / math.sqrt(len(each)),
        "free": same.float().mean().item(),
        "free_whole": same.all(1).float().mean().item(),
        "free_until_other": same.int().cumprod(1).sum(1).float().mean().item(),
        "bytes": sum(part["bytes"] for part in parts),
        "of_bf16": ratio["bytes"],
        "seconds_of_bf16": ratio["seconds"],
        "kl_each": each,
    }


def table(result: dict) -> Table:
    """The result as a table for a terminal."""
    what = f"{result['prompts']} prompts of {result['prompt_tokens']} tokens, {result['tokens']} new ones"
    shown = Table("model", "cache", "given: same", "KL, millinats", "free: same", "whole", "bytes", "time", title=what)
    for row in result["rows"]:
        kl = f"{1e3 * row['kl']:.2f} ± {1e3 * row['kl_error']:.2f}"
        cells = (f"{row[key]:.1%}" for key in ("free", "free_whole", "of_bf16"))
        agreed = f"{row['agreed']:.1%} ± {row['agreed_error']:.1%}"
        shown.add_row(row["model"], row["cache"], agreed, kl, *cells, f"{row['seconds_of_bf16']:.2f}")
    return shown


def main() -> None:
    """Measure, print the table, write the result."""
    options = parser(__doc__)
    options.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    options.add_argument("--prompts", type=int, default=64)
    options.add_argument("--prompt-tokens", type=int, default=128)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--blocks", type=int, nargs="+", default=[1, 16, 32, 64, 128])
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--text", action="store_true", help="read the manual on, and measure its loss")
    options.add_argument("--name", default="kv_cache", help="of the result file")
    options.add_argument("--json", action="store_true")
    options = options.parse_args()
    console, err = Console(), Console(stderr=True)
    result: dict[str, Any] = {"machine": machine()} | {
        key: getattr(options, key) for key in ("prompts", "prompt_tokens", "tokens")
    }
    result |= {"batch": options.batch, "rows": []}
    real = load("smollm2", options.prompt_tokens + options.text * (options.tokens + 1), options.prompts)
    of_batch, of_rows, shown = (text_batch, text_row, text_table) if options.text else (batch, row, table)
    every = len(real.windows) // options.prompts
    prompts_BT = torch.cat(real.windows[::every][: options.prompts])
    for dtype in options.dtype:
        model = real.model.to(DTYPES[dtype])
        parts: list[dict[str, dict]] = []
        for prompt_BT in prompts_BT.split(options.batch):
            start = time.monotonic()
            with torch.inference_mode():
                parts.append(of_batch(model, caches(model.config, dtype, options.blocks), prompt_BT, options.tokens))
            err.print(f"{dtype}, prompt {len(parts) * options.batch}: {time.monotonic() - start:.0f} s")
        base = [part[REFERENCE] for part in parts]
        names = [name for name in parts[0] if name != REFERENCE]
        result["rows"] += [of_rows(name, dtype, [part[name] for part in parts], base) for name in names]
    console.print(json.dumps(result) if options.json else shown(result))
    err.print(f"written to {save(options.name, result)}")


if __name__ == "__main__":
    main()
