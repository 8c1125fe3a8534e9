"""Batches of token ids, padding masks and targets for any text model, made from plain text.

    causal     the logits at t predict token t + 1                             GPT-2, Llama
    masked     15 % of the tokens are hidden; the logits there predict them    BERT, RoBERTa
    seq2seq    the text is its own target                                      T5, BART
    none       nothing is predicted: an encoder, a classifier, any other module

transformers' own tables of classes say which of them a model is for.  15 % is what BERT was trained with.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from fp8engine._torch import tree_map
from fp8engine.errors import ConversionError

NOTHING = -100  # a target that is ignored, as in torch's cross_entropy
HIDDEN = 0.15
# BART's class stands in two tables: what it was made for comes first.
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
}


@dataclass(frozen=True)
class Tokens:
    """How text becomes ids.  pad fills short texts up; mask hides a token that is to be predicted."""

    encode: Callable[[str], list[int]]
    pad: int = 0
    mask: int = 0


BYTES = Tokens(lambda text: list(text.encode()))


@dataclass(frozen=True)
class Batch:
    """The inputs of a model (keywords, or positions), and what its output is compared on.

    real: [B, T] bool, False for padding.  targets: [B, T], the id that the logits at each place should name, NOTHING
    where none; None where the model predicts no tokens.
    """

    inputs: dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
    real: torch.Tensor
    targets: torch.Tensor | None


def pieces(text: str, count: int) -> list[str]:
    """Up to `count` paragraphs of a text (its lines, where no line is empty), evenly spaced.

    >>> pieces("One.\\nTwo.\\n\\nThree.\\n\\nFour.", 2), pieces("One.\\nTwo.", 9)
    (['One.\\nTwo.', 'Three.'], ['One.', 'Two.'])
    """
    text = text.strip().replace("\r\n", "\n")
    found = [part.strip() for part in text.split("\n\n" if "\n\n" in text else "\n") if part.strip()]
    if len(found) <= count:
        return found
    return [found[index * len(found) // count] for index in range(count)]


def task_of(model: nn.Module) -> str:
    """causal, seq2seq, masked or none, by the class of the model (of the one that peft wraps).

    >>> task_of(nn.Linear(2, 2))
    'none'
    """
    inner = getattr(model, "get_base_model", lambda: model)()
    names = {kind.__name__ for kind in type(inner).__mro__ if kind.__module__.startswith("transformers.")}
    if names:
        tables = importlib.import_module("transformers.models.auto.modeling_auto")
        for task, table in TASKS.items():
            entries = getattr(tables, table).values()  # a class's name, or a tuple of them
            if any(names.intersection([entry] if isinstance(entry, str) else entry) for entry in entries):
                return task
    return "none"


def batches(model: nn.Module, texts: list[list[int]], tokens: Tokens, size: int = 8) -> list[Batch]:
    """Texts, as ids, in batches of `size` on the model's device, padded on the right.

    Raises ConversionError for no text with two tokens, and for an id that the model has no embedding for.

    >>> (batch,) = batches(nn.Embedding(256, 8), [BYTES.encode("two"), BYTES.encode("texts")], BYTES)
    >>> batch.real.sum(1).tolist(), batch.targets
    ([3, 5], None)
    """
    kept = [torch.tensor(ids) for ids in texts if len(ids) > 1]  # one token predicts nothing
    if not kept:
        raise ConversionError("nothing to compare on: the text is empty, or each part of it a single token")
    _check_ids(model, max(int(ids.max()) for ids in kept))
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    task, generator = task_of(model), torch.Generator().manual_seed(0)
    made = []
    for at in range(0, len(kept), size):
        some = kept[at : at + size]
        ids = pad_sequence(some, batch_first=True, padding_value=tokens.pad)
        real = pad_sequence([torch.ones_like(one, dtype=torch.bool) for one in some], batch_first=True)
        given, targets = _asked(task, ids, real, tokens, generator)
        inputs = _called_with(model, {"input_ids": given, "attention_mask": real.long()})
        if task == "seq2seq" and isinstance(inputs, dict) and targets is not None:
            inputs["labels"] = targets  # from which the model makes its decoder's input
        placed = tree_map(lambda value: value if value is None else value.to(device), (inputs, real, targets))
        made.append(Batch(*placed))
    return made


def _asked(
    task: str, ids: torch.Tensor, real: torch.Tensor, tokens: Tokens, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(ids as given to the model, targets)."""
    if task == "none":
        return ids, None
    wanted = ids.masked_fill(~real, NOTHING)
    if task == "causal":
        return ids, torch.cat([wanted[:, 1:], torch.full_like(wanted[:, :1], NOTHING)], 1)
    if task == "seq2seq":
        return ids, wanted
    hidden = (torch.rand(ids.shape, generator=generator) < HIDDEN) & real
    hidden[:, 1] |= ~hidden.any(1)  # each text has at least one
    return ids.masked_fill(hidden, tokens.mask), wanted.masked_fill(~hidden, NOTHING)


def _called_with(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict | tuple:
    """The inputs that the model's forward knows, by keyword; a module that knows none gets the ids."""
    known = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return dict(inputs)
    return {key: value for key, value in inputs.items() if key in known} or (inputs["input_ids"],)


def _check_ids(model: nn.Module, largest: int) -> None:
    get = getattr(model, "get_input_embeddings", None)
    try:
        size = getattr(get(), "num_embeddings", None) if get is not None else None
    except (AttributeError, NotImplementedError):  # transformers raises these for models that embed no ids
        size = None
    if size is not None and largest >= size:
        raise ConversionError(
            f"the text has token id {largest}, and {type(model).__name__} has embeddings for {size}: "
            "give the tokenizer that the model was trained with"
        )


def real_rows(values: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The rows of real tokens, of [B, T, ...] or [B T, ...]; everything, where that is not the shape."""
    if values.dim() > 2 and values.shape[:2] == real.shape:
        return values[real]
    return values[real.flatten()] if values.shape[:1] == (real.numel(),) else values


def pooled(hidden: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """[B, width]: the mean over a text's tokens; a module's own [B, width] as it is."""
    if hidden.shape[:2] != real.shape or hidden.dim() != 3:
        return hidden.flatten(1)
    weights = real.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)
