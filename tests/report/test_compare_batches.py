"""Text as batches: what is hidden from a masked model, and how a text is cut into pieces."""

from typing import Any

import pytest
import tiny_models
import torch
import transformers

from fp8engine.report.compare.batches import NOTHING, Tokens, batches, pieces


def test_hidden_tokens_are_real_ones_and_the_same_each_time():
    model = transformers.BertForMaskedLM(transformers.BertConfig(**tiny_models._encoder()))
    tokens = Tokens(lambda text: [], pad=0, mask=63)
    ids = [list(range(1, 2 + length)) for length in (1, 2, 30, 60)]
    (first,), (again,) = (batches(model, ids, tokens) for _ in range(2))
    given: Any = first.inputs
    again_given: Any = again.inputs
    hidden = first.targets != NOTHING
    assert torch.equal(given["input_ids"], again_given["input_ids"])
    assert hidden.any(1).all()
    assert not (hidden & ~first.real).any()
    assert (given["input_ids"][hidden] == 63).all()
    assert hidden.sum() < 30  # of 96; 15 % is 14


@pytest.mark.parametrize(
    ("text", "count", "want"),
    [
        ("a\n\nb\n\n\n\nc\n", 9, ["a", "b", "c"]),
        ("a\r\n\r\nb c\r\nd\r\n", 9, ["a", "b c\nd"]),
        (" one line ", 9, ["one line"]),
        ("\n".join("0123456789"), 5, ["0", "2", "4", "6", "8"]),
        (" \n\n ", 9, []),
    ],
)
def test_pieces(text: str, count: int, want: list[str]):
    assert pieces(text, count) == want
