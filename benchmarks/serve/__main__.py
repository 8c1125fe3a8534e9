"""Exports loaded by vLLM in another process, new weights into that vLLM while it runs, lm-eval: `make serve-check`.

A small Llama (examples/serve_export.py), and SmolLM2 where ~/.cache/fp8engine/real/smollm2 is there.  Prints a table,
writes benchmarks/results, and ends with 1 if a target is missed.  Nothing is fetched.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import torch
import transformers

from benchmarks import common, real_models
from benchmarks.serve.judge import codes_that_differ, exit_code, gap, in_16_bits, least_sqnr, line, row
from benchmarks.serve.reading import NUDGE, lm_eval_rows

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import serve_export
from vllm_rollout import Engine, EngineFailed

import fp8engine as fe

EXACT = fe.rowwise(power_of_2=False)  # vLLM's formula of an activation's scale: amax / 448
PROMPT = list(b"The following ")
NEW, PROMPTS = 24, 64
LOG_WORDS = ("Initializing a V1", "Selected", "Reloading", "Failed to load", "prefix cache")


@torch.no_grad()
def logprobs(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Of every token but the first."""
    logits = torch.cat([model(part).logits[:, :-1].float() for part in ids_BT.split(16)])
    return logits.log_softmax(-1).gather(2, ids_BT[:, 1:, None])[..., 0]


def said(engine: Engine) -> list[str]:
    """vLLM's log lines on what it loaded, without the path of the temporary folder's length."""
    return [line[:400] for line in engine.lines(*LOG_WORDS)]


def loaded(model: Any, recipe: Any, folder: Path) -> list[dict]:
    """Greedy tokens and log-probabilities of vLLM beside fe.hf.load's."""
    name = recipe if isinstance(recipe, str) else recipe.name
    fe.hf.export(model, folder / name, recipe)
    served = fe.hf.load(folder / name)
    ids = torch.tensor([PROMPT])
    want = served.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0].tolist()
    replaced = name == "current"
    with Engine(sys.executable, folder / name, folder / f"{name}.log", stand_in=replaced) as engine:
        ((tokens, _),) = engine.generate([PROMPT], NEW, temperature=0)
        same = sum(a == b for a, b in zip(want, PROMPT + tokens, strict=True))
        found = gap(logprobs(served, ids), torch.tensor(engine.logprobs([PROMPT])))
        note = "one operation of vLLM's replaced: static_scaled_fp8_quant" if replaced else ""
        largest = found["largest"]
        rows = [
            row(f"{name}: tokens equal, of {len(want)}", same, "38", same == 38, log=said(engine), note=note),
            row(f"{name}: largest gap of log-probabilities", largest, "<= 0.1", largest <= 0.1, **found),
        ]
        if replaced:
            least = least_sqnr(model.state_dict(), engine.held())
            rows.append(row(f"{name}: least SQNR after vLLM's requantisation, dB", least, ">= 31", least >= 31))
    return rows


def refused(model: Any, recipe: str, folder: Path) -> dict:
    """Blocks run where the CPU has AMX; elsewhere vLLM accepts the config and finds no kernel."""
    if not (folder / recipe).exists():
        fe.hf.export(model, folder / recipe, recipe)
    try:
        with Engine(sys.executable, folder / recipe, folder / f"{recipe}_plain.log") as engine:
            tokens = engine.generate([PROMPT], NEW, temperature=0)
            return row(f"{recipe}: as vLLM is", f"{len(tokens[0][0])} tokens", "", None, log=said(engine))
    except EngineFailed as failed:
        words = str(failed).split("; its log")[0]
        met = "requires AMX" in words if recipe == "blockwise" else None
        return row(f"{recipe}: as vLLM is", words, "accepted up to the kernel" if met is not None else "", met)


def updated(name: str, model: Any, ids_BT: torch.Tensor, folder: Path) -> list[dict]:
    """Three steps of training in FP32; iter_fp8 into a running vLLM after them: codes, log-probabilities, bytes."""
    trainer = fe.convert(copy.deepcopy(model).float(), EXACT)
    fe.hf.export(trainer, folder / name)
    with (
        Engine(sys.executable, folder / name, folder / f"{name}_float32.log", "float32") as engine,
        Engine(sys.executable, folder / name, folder / f"{name}_bfloat16.log") as in_bf16,
    ):
        optimizer = torch.optim.SGD(trainer.parameters(), lr=0.02)
        for part in ids_BT[:24].split(8):
            trainer.train()(part, labels=part).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ours, asked = logprobs(trainer.eval(), ids_BT), ids_BT.tolist()
        old = gap(ours, torch.tensor(engine.logprobs(asked)))
        engine.update(fe.hf.iter_fp8(trainer))
        differ = codes_that_differ(dict(fe.hf.iter_fp8(trainer)), engine.held())
        theirs = torch.tensor(engine.logprobs(asked))
        sent = in_bf16.update(in_16_bits(fe.hf.iter_fp8(trainer)))
        rounded = gap(ours, torch.tensor(in_bf16.logprobs(asked)))
        log = said(engine)
    found, losses = gap(ours, theirs), [-ours.mean().item(), -theirs.mean().item()]
    trainer.get_input_embeddings().weight.data.mul_(NUDGE)
    itself = gap(ours, logprobs(trainer, ids_BT))
    share = sent / sum(p.numel() * 2 for p in trainer.parameters())
    gaps = f"{name}: gap of log-probabilities, {len(ids_BT)} prompts,"
    return [
        row(f"{name}: codes and scales that differ after the update", differ, "0", differ == 0),
        row(f"{gaps} FP32: mean", found["mean"], "<= 0.1", found["mean"] <= 0.1, **found, losses=losses, log=log),
        row(f"{gaps} FP32: largest", found["largest"], "<= 0.1", found["largest"] <= 0.1),
        row(f"{gaps} FP32, before the update: mean", old["mean"], "", None, **old),
        row(f"{gaps} vLLM in BF16: mean", rounded["mean"], "", None, **rounded),
        row(f"{name}: the trainer to itself, embedding 1 + 2^-20 times: mean", itself["mean"], "", None, **itself),
        row(f"{name}: bytes sent over BF16's", share, "", None, bytes=sent),
    ]


def main() -> int:
    """Every row; 1 if a target is missed."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = serve_export.train(60)
    ids_BT = serve_export.text()[-PROMPTS * 32 :].view(PROMPTS, 32)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for recipe in (EXACT, "rowwise", "current"):
            rows += loaded(model, recipe, folder)
        rows += [refused(model, recipe, folder) for recipe in ("current", "blockwise")]
        rows += updated("small Llama", model, ids_BT, folder)
        if (source := real_models.CACHE / "smollm2" / "config.json").exists():
            smol = transformers.AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.bfloat16)
            tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent)
            text = bytes(serve_export.text()[-20_000:].tolist()).decode()
            ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
            rows += updated("SmolLM2", smol, ids[: PROMPTS * 32].view(PROMPTS, 32), folder)
            rows += lm_eval_rows(folder, smol, tokenizer, text[-12_000:])
        else:
            rows.append(row("SmolLM2", "not run: benchmarks/real_models.py says how to get it", "", None))
    print(*map(line, rows), sep="\n")
    print(common.save("serve", {"what": "serve", "machine": common.machine(), "rows": rows}))
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
