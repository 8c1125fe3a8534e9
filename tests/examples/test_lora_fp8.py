"""examples/lora_fp8.py in short form: the base is smaller, the loss falls, and merging and serving keep it."""

import lora_fp8
import pytest


@pytest.mark.slow
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
