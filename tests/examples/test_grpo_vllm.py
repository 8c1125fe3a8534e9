"""examples/grpo_vllm.py without vLLM: rewards rise, trainer and rollout agree, and codes are what is sent."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_vllm.py"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning", "ignore::DeprecationWarning")
def test_the_reward_rises_and_the_engine_follows(capsys: pytest.CaptureFixture[str]):
    rows = runpy.run_path(str(EXAMPLE))["main"](12, pretraining=60)
    rewards = [row["reward"] for row in rows]
    # 64 answers of 24 tokens: a share near 0.2 has a standard error of 0.01, the mean of three steps less.
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.03
    # The same codes and the same casts, but attention over a cache rather than over the whole sequence, in BF16.
    # An engine that does not follow is off by the training itself.
    assert all(row["gap"] < 0.1 for row in rows)
    assert len({row["sent"] for row in rows}) == 1
    assert "vLLM is not run" in capsys.readouterr().out
