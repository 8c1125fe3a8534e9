"""What runs on a Blackwell card, and what it is said to be: pretended cards, and machine code for them."""

import pytest
import torch
from casts import E4M3

from benchmarks.machine_code import offline
from fp8engine.cli import checks
from fp8engine.kernels import tuning
from fp8engine.kernels.matmul import matmul_fp8
from fp8engine.ops import card_trials, matmul
from fp8engine.ops.choice_file import Job
from fp8engine.ops.reference import Epilogue

CUDA, SHAPE = torch.device("cuda", 0), (8192, 4096, 4096)
BY_ROW = "on Blackwell cuBLASLt multiplies scales per tensor or row"
IN_BLOCKS = (
    "on Blackwell our kernel for Triton multiplies scales in blocks, with {}'s tiles and without Gluon; "
    "it was written without a card of sm_{}, and never measured on one"
)


@pytest.fixture
def card(pretended, monkeypatch: pytest.MonkeyPatch):
    """Pretend a card of that capability, which has measured nothing."""
    monkeypatch.setattr(card_trials, "look", lambda *matmul: None)
    return lambda capability: pretended(capability, "NVIDIA B200")


@pytest.mark.parametrize(
    ("capability", "by_row", "in_blocks"),
    [
        ((10, 0), BY_ROW, IN_BLOCKS.format("Hopper", 100)),
        ((10, 3), BY_ROW, IN_BLOCKS.format("Hopper", 103)),
        ((12, 0), f"{BY_ROW} until this card has measured our kernels", IN_BLOCKS.format("Ada", 120)),
    ],
)
def test_reports_and_doctor_name_what_multiplies_there(capability, by_row, in_blocks, card):
    card(capability)
    for kind in ("tensor", "row"):
        assert matmul.choose(CUDA, False, SHAPE, "fast", kind) == "cublas"
        assert matmul.why_chosen(CUDA, SHAPE, "fast", kind) == by_row
    for kind in ("block", "block by block"):
        assert matmul.choose(CUDA, True, SHAPE, "exact", kind) == "triton"
        assert matmul.why_chosen(CUDA, SHAPE, "exact", kind) == in_blocks
    (note,) = checks._card_notes(CUDA)  # and not that `benchmarks.tune`, which has no row for such a card, measures it
    assert note == f"cuda:0: {by_row}; {in_blocks}"


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_older_cards_are_told_what_they_were_told(capability, card):
    card(capability)
    why = {  # kernels/tuning.json has times of a Hopper card
        (8, 9): "our kernels were not measured on this card for this shape",
        (9, 0): "kernels/tuning.json: our kernel runs 0.98 times as fast as torch's",
    }
    assert matmul.why_chosen(CUDA, SHAPE, "fast", "row") == why[capability]
    notes = checks._card_notes(CUDA)
    assert [checks.NOT_TUNED in note for note in notes] == [True] * (capability == (8, 9))


def test_a_card_with_tensor_memory_has_nothing_to_measure_and_one_without_has(card, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(card_trials, "CardRunner", lambda where: None)
    monkeypatch.setattr(card_trials.choice_file, "key_of", lambda where: {"card": "pretended", "driver": None})
    trials_of = card_trials.trials_of.__wrapped__
    card((10, 0))
    assert trials_of(CUDA) is None
    card((12, 0))
    assert trials_of(CUDA) is not None


@pytest.mark.parametrize("capability", [(10, 0), (12, 0)])
@pytest.mark.parametrize("kind", ["block", "block by block"])
def test_small_results_that_are_counted_compile_there(capability, kind):
    """Those of a layer that stores its result in FP8.  Triton fails on sm_100 where `flatten` makes the loops one."""
    meta = torch.device("meta")
    made = card_trials.operands(Job("matmul_block", kind, 512, 512, 4096), torch.device("cpu"))
    a, b = (each._replace(data=each.data.to(meta), scale=each.scale.to(meta)) for each in made)
    config = tuning.pick("matmul_block", capability, 512, 512)
    amax, counts = torch.empty(1, device=meta), torch.empty(7, 1, dtype=torch.int64, device=meta)
    end = Epilogue(None, E4M3, "none", torch.empty((), device=meta), amax, counts)
    with offline.caught(10 * capability[0] + capability[1]) as launches:
        matmul_fp8(a, b, end, config=config)
    made = launches[0].compile()
    assert made.spills == 0
    assert ("UTCQMMA" if capability == (10, 0) else "QMMA") in made.sass
