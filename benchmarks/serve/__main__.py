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
from benchmarks.serve.reading import lm_eval_rows

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import serve_export
from vllm_rollout import Engine, EngineFailed

import fp8engine as fe

PROMPT = list(b"The following ")
NEW, PROMPTS = 24, 64
LOG_WORDS = ("Initializing a V1", "Selected", "Reloading", "Failed to load", "prefix cache")


def row(what: str, value: Any, target: str, met: bool | None, **more: Any) -> dict:
    """A row of the table.  met: None where no target is set."""
    return {"what": what, "value": value, "target": target, "met": met} | more


@torch.no_grad()
def logprobs(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Of every token but the first."""
    logits = torch.cat([model(part).logits[:, :-1].float() for part in ids_BT.split(16)])
    return logits.log_softmax(-1).gather(2, ids_BT[:, 1:, None])[..., 0]


def said(engine: Engine) -> list[str]:
    """vLLM's log lines on what it loaded, without the path of the temporary folder's length."""
    return [line[:400] for line in engine.lines(*LOG_WORDS)]


def loaded(model: Any, recipe: str, folder: Path) -> list[dict]:
    """Greedy tokens and log-probabilities of vLLM beside fe.hf.load's."""
    fe.hf.export(model, folder / recipe, recipe)
    served = fe.hf.load(folder / recipe)
    ids = torch.tensor([PROMPT])
    want = served.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0].tolist()
    replaced = recipe == "current"
    with Engine(sys.executable, folder / recipe, folder / f"{recipe}.log", stand_in=replaced) as engine:
        ((tokens, _),) = engine.generate([PROMPT], NEW, temperature=0)
        same = sum(a == b for a, b in zip(want, PROMPT + tokens, strict=True))
        gap = (logprobs(served, ids) - torch.tensor(engine.logprobs([PROMPT]))).abs().max().item()
        note = "one operation of vLLM's replaced: static_scaled_fp8_quant" if replaced else ""
        rows = [
            row(f"{recipe}: tokens equal, of {len(want)}", same, "38", same == 38, log=said(engine), note=note),
            row(f"{recipe}: largest gap of log-probabilities", gap, "<= 0.1", gap <= 0.1),
        ]
        if replaced:
            rows.append(requantised(model, engine.held()))
    return rows


def requantised(model: Any, held: dict[str, torch.Tensor]) -> dict:
    """The least SQNR of the weights as vLLM holds them, after its requantize_with_max_scale, to the BF16 ones."""
    parts = {"qkv_proj": [f"{x}_proj" for x in "qkv"], "gate_up_proj": ["gate_proj", "up_proj"]}
    state, least = model.state_dict(), float("inf")
    for name, codes_KN in held.items():
        if codes_KN.dtype != torch.float8_e4m3fn:
            continue
        parent, layer, _ = name.rsplit(".", 2)
        found = (codes_KN.double() * held[f"{parent}.{layer}.weight_scale"].double()).t()
        want = [state[f"{parent}.{part}.weight"].double() for part in parts.get(layer, [layer])]
        for w, q in zip(want, found.split([len(w) for w in want]), strict=True):
            least = min(least, 10 * torch.log10(w.square().sum() / (q - w).square().sum()).item())
    return row("current: least SQNR after vLLM's requantisation, dB", least, ">= 31", least >= 31)


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
    """Three steps of training; iter_fp8 into the running vLLM after them: codes, log-probabilities, bytes."""
    trainer = fe.convert(copy.deepcopy(model), "rowwise")
    fe.hf.export(trainer, folder / name)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.02)
    with Engine(sys.executable, folder / name, folder / f"{name}_update.log") as engine:
        for part in ids_BT[:24].split(8):
            trainer.train()(part, labels=part).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trainer.eval()
        old = torch.tensor(engine.logprobs(ids_BT.tolist()))
        sent = engine.update(fe.hf.iter_fp8(trainer))
        differ = codes_that_differ(dict(fe.hf.iter_fp8(trainer)), engine.held())
        ours, theirs = logprobs(trainer, ids_BT), torch.tensor(engine.logprobs(ids_BT.tolist()))
        gap = (ours - theirs).abs()
        # What FP8 casts of activations do by themselves to small differences: this engine, the same codes, in FP32.
        in_fp32 = logprobs(fe.hf.load(folder / name, dtype=torch.float32), ids_BT)
        in_bf16 = logprobs(fe.hf.load(folder / name, dtype=torch.bfloat16), ids_BT)
        more = {
            "mean": gap.mean().item(),
            "mean before the update": (ours - old).abs().mean().item(),
            "loss of trainer, vLLM": [-ours.mean().item(), -theirs.mean().item()],
            "this engine in BF16 to itself in FP32, mean and largest": [
                (in_fp32 - in_bf16).abs().mean().item(),
                (in_fp32 - in_bf16).abs().max().item(),
            ],
            "log": said(engine),
        }
    share = sent / sum(p.numel() * 2 for p in trainer.parameters())
    largest = gap.max().item()
    return [
        row(f"{name}: codes and scales that differ after the update", differ, "0", differ == 0),
        row(
            f"{name}: largest gap of log-probabilities, {len(ids_BT)} prompts",
            largest,
            "<= 0.1",
            largest <= 0.1,
            **more,
        ),
        row(f"{name}: bytes sent over BF16's", share, "", None, bytes=sent),
    ]


def codes_that_differ(sent: dict[str, torch.Tensor], held: dict[str, torch.Tensor]) -> int:
    """Codes and scales of vLLM's fused layers that are not those that were sent.  Every held FP8 layer is compared."""
    parts = {"qkv_proj": [f"{x}_proj" for x in "qkv"], "gate_up_proj": ["gate_proj", "up_proj"]}
    differ = compared = 0
    for name, tensor in held.items():
        if tensor.dtype != torch.float8_e4m3fn:
            continue
        parent, layer, _ = name.rsplit(".", 2)
        members = [f"{parent}.{part}" for part in parts.get(layer, [layer])]
        codes_NK = torch.cat([sent[f"{each}.weight"] for each in members])
        scale_N1 = torch.cat([sent[f"{each}.weight_scale"] for each in members])
        differ += int((codes_NK.view(torch.uint8) != tensor.t().contiguous().view(torch.uint8)).sum())
        differ += int((scale_N1 != held[f"{parent}.{layer}.weight_scale"]).sum())
        compared += len(members)
    assert compared == sum(t.dtype == torch.float8_e4m3fn for t in sent.values()), "a layer was not compared"
    return differ


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
        rows += loaded(model, "rowwise", folder) + loaded(model, "current", folder)
        rows += [refused(model, recipe, folder) for recipe in ("current", "blockwise")]
        rows += updated("small Llama", model, ids_BT, folder)
        if (source := real_models.CACHE / "smollm2" / "config.json").exists():
            smol = transformers.AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.bfloat16)
            tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent)
            text = bytes(serve_export.text()[-20_000:].tolist()).decode()
            ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
            rows += updated("SmolLM2", smol, ids[: PROMPTS * 32].view(PROMPTS, 32), folder)
            rows += lm_eval_rows(smol, tokenizer, text[-6000:], folder)
        else:
            rows.append(row("SmolLM2", "not run: benchmarks/real_models.py says how to get it", "", None))
    for each in rows:
        value = f"{each['value']:.4g}" if isinstance(each["value"], float) else each["value"]
        print(f"{ {True: 'met', False: 'MISSED', None: ''}[each['met']]:7} {each['what']}: {value}  {each['target']}")
    print(common.save("serve", {"what": "serve", "machine": common.machine(), "rows": rows}))
    return int(any(each["met"] is False for each in rows))


if __name__ == "__main__":
    sys.exit(main())
