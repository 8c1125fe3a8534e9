"""examples/vllm_rollout.py's pipe, to a process without vLLM: what arrives, and what is said of each way to fail.

And two journeys without vLLM: grpo_vllm.py and lora_fp8.py, in short form.
"""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpo_vllm
import lora_fp8
import pytest
import torch
from vllm_rollout import Engine, EngineFailed

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parents[1] / "helpers" / "held_tensors.py"
LARGE = torch.randn(1 << 20)  # 4 MB: more than the pipe holds by itself


class Held(Engine):
    """An engine that holds tensors and nothing else."""

    program = PROGRAM


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Held]:
    with Held(sys.executable, "no folder", tmp_path / "log") as engine:
        yield engine


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name].view(torch.uint8), wanted[name].view(torch.uint8)) for name in wanted
    )


def test_codes_and_scales_arrive_bit_for_bit(engine: Held):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(16, 16)
    sent = {"codes": codes, "scale": torch.tensor([2.0**-130, 3.0]), "norm": torch.randn(5).bfloat16(), "large": LARGE}
    assert engine.update(sent.items()) == 256 + 8 + 10 + LARGE.nbytes
    assert same(engine.held(), sent)
    assert engine.update([("scale", torch.ones(2))]) == 8
    assert same(engine.held(), sent | {"scale": torch.ones(2)})


def test_a_failed_update_says_what_the_engine_said(engine: Held):
    """It ends in the middle of an update; what was still to be sent does not hide its reason."""
    pairs = [("refused", torch.ones(1)), *((f"large {i}", LARGE) for i in range(8))]
    with pytest.raises(EngineFailed, match=r"ValueError: no parameter is called refused; its log is .*log"):
        engine.update(pairs)
    assert engine.lines("ValueError"), "the process's own traceback"
    with pytest.raises(EngineFailed, match="has been closed"):
        engine.held()
    with pytest.raises(EngineFailed, match="has been closed"):
        engine.update([])


def test_a_message_that_was_cut_off_and_an_engine_that_ends_without_a_word(engine: Held, tmp_path: Path, monkeypatch):
    with pytest.raises(EngineFailed, match="the process ended with 7"):
        engine.generate([[1]], 1)
    monkeypatch.setattr("vllm_rollout.save", lambda tensors: b"\x00\x00")
    failed = pytest.raises(EngineFailed, match="SafetensorError")
    with Held(sys.executable, "no folder", tmp_path / "another") as again, failed:
        again.update([("a", torch.ones(1))])


def test_weights_that_cannot_be_made_close_the_engine(engine: Held):
    """Half of an update is not left to be served."""

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        raise FloatingPointError("weights are NaN")

    with pytest.raises(FloatingPointError, match="weights are NaN"):
        engine.update(pairs())
    with pytest.raises(EngineFailed, match="has been closed"):
        engine.held()


def test_a_call_waits_for_the_update_of_another_thread(engine: Held):
    found: list[dict[str, torch.Tensor]] = []
    asking = threading.Thread(target=lambda: found.append(engine.held()))

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(1)
        asking.start()
        time.sleep(0.3)  # its message would come between ours
        yield "b", torch.ones(1)

    engine.update(pairs())
    asking.join()
    assert same(found[0], {"a": torch.zeros(1), "b": torch.ones(1)})


def test_without_vllm_the_engine_says_so(tmp_path: Path):
    with pytest.raises(EngineFailed, match="No module named 'vllm'"):
        Engine(sys.executable, "no folder", tmp_path / "log")


@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning", "ignore::DeprecationWarning")
def test_the_reward_rises_and_the_engine_follows(capsys: pytest.CaptureFixture[str]):
    rows = grpo_vllm.main(12, pretraining=60)
    rewards = [row["reward"] for row in rows]
    # 64 answers of 24 tokens: a share near 0.2 has a standard error of 0.01, the mean of three steps less.
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.03
    # The same codes and the same casts, but attention over a cache rather than over the whole sequence, in BF16.
    # An engine that does not follow is off by the training itself.
    assert all(row["gap"] < 0.1 for row in rows)
    assert len({row["sent"] for row in rows}) == 1
    assert "vLLM is not run" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_journey_from_base_to_served_model(capsys):
    found = lora_fp8.main(steps=12, pretrain=60)
    # Linear weights at one byte, 4 bytes a row; the embedding and the head (a tenth of this small model) stay in BF16.
    assert found["base bytes"] < 0.58 * found["bf16 bytes"]
    assert found["after"] < found["before"] - 0.1
    # Casts at 31.5 dB change a loss by well under 1 %: benchmarks/real.py.
    assert found["merged"] == pytest.approx(found["after"], rel=0.02)
    assert found["served"] == pytest.approx(found["merged"], rel=0.02)
    assert "loss on unseen windows" in capsys.readouterr().out
