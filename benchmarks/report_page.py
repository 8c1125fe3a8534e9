"""The page of docs/report.png: MiniLM is fine-tuned under auto, which changes the formats of many tensors.

    python benchmarks/report_page.py [--steps 48] [--out report/minilm.html] [--picture docs/report.png]

The run is that of examples/hf_finetune.py, with `fe.auto(interval=2)`.  --picture: of the page, 1280 dots wide, by a
Chromium that is installed.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch.nn import functional as F

import fp8engine as fe

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from hf_finetune import RATE, Classifier, pretrained, sentences, tokenized

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def fine_tuned(steps: int) -> tuple[Classifier, list[float]]:
    """(the model under auto, its training losses)."""
    torch.manual_seed(0)
    encoder, tokenizer = pretrained()
    model = Classifier(encoder, encoder.config.hidden_size).train()
    encoder.embeddings.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fe.errors.EmulationWarning)  # the page says it
        fe.convert(model, fe.auto(interval=2))
    texts, losses = tokenized(sentences()[0], tokenizer), []
    groups = [{"params": [*part.parameters()], "lr": RATE[name]} for name, part in model.named_children()]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    rounds = itertools.chain.from_iterable(texts.batches(seed) for seed in itertools.count())
    for chosen in itertools.islice(rounds, steps):
        ids, mask, labels = texts.batch(chosen)
        loss = F.cross_entropy(model(ids, mask), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def picture(page: Path, path: Path) -> None:
    """A PNG of the page's first 2000 dots.  Raises SystemExit without a Chromium."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no picture: none of {', '.join(BROWSERS)} is installed")
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,2000"]
    command = [browser, *options, f"--screenshot={path.resolve()}", page.resolve().as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)  # of a machine without a desktop it says pages


def main() -> None:
    """Train, write the page, say what changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path("report/minilm.html"))
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    model, losses = fine_tuned(options.steps)
    report = fe.inspect(model)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report.to_html(options.out, losses=losses)
    changed = Counter(f"{decision['before']} -> {decision['after']}" for decision in report.decisions)
    for change, count in changed.most_common():
        print(f"{count:4d}  {change}")
    if options.picture:
        picture(options.out, options.picture)


if __name__ == "__main__":
    main()
