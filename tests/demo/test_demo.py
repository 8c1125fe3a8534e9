"""The demo: every precision learns, from the same bytes and the same first weights, and what is reported is so."""

import functools
import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8engine.demo import DEFAULT, Config, DemoError, Session, picture, precision, run, session, train
from fp8engine.demo.config import Text, read
from fp8engine.demo.precision import SumsInFP32
from fp8engine.demo.progress import Silent
from fp8engine.demo.report import COLUMNS, Summary, about
from fp8engine.demo.trainer import Trainer
from fp8engine.errors import UnknownName
from fp8engine.ops import device
from fp8engine.report.page.svg import colour
from fp8engine.report.state import scaling_state_dict

TINY = Config(size="tiny", steps=40, batch=8)
FP8 = [recipe for recipe in DEFAULT if recipe not in ("fp32", "bf16", "fp16")]
UNIFORM = math.log(256)


def trainer(recipe: str, config: Config = TINY, seed: int = 0) -> Trainer:
    return Trainer(config, recipe, seed, read(None, config.shape.context))


@pytest.fixture(scope="module")
def fp32():
    return run(TINY, "fp32")


@pytest.mark.parametrize("recipe", DEFAULT)
def test_every_recipe_learns_and_ends_near_fp32(recipe: str, fp32):
    """40 steps take fp32 from 5.5 to 2.6 nats a byte, below any fixed frequencies (3.2); measured within 0.4 %."""
    result = run(TINY, recipe)
    assert result.curve.losses[0] == pytest.approx(UNIFORM, rel=0.2)
    assert result.validation_loss < 2.8
    assert result.validation_loss == pytest.approx(fp32.validation_loss, rel=0.02)
    assert result.steps == len(result.curve.losses) == 40
    assert [step for step, _ in result.curve.validation] == [10, 20, 30, 40]
    assert result.curve.validation[-1][1] == result.validation_loss
    assert result.train_loss == pytest.approx(sum(result.curve.losses[-20:]) / 20, rel=1e-12)
    assert result.sample.startswith("The ")
    # BF16 where this CPU has instructions for it: else its products are summed in FP32, and the table says so.
    hardware = {"fp32": True, "bf16": device.cpu_multiplies("bf16"), "fp16": "emulated" not in result.ran_on}
    assert ("emulated" in result.ran_on) != hardware.get(recipe, False)


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_the_share_in_fp8_is_all_but_the_head(recipe: str):
    """Twelve weights of width^2 a block, and a head of 256 x width that stays in 32 bits."""
    result = run(Config(size="tiny", steps=1, batch=2), recipe)
    inside, head = 2 * 12 * 64 * 64, 256 * 64
    assert result.fp8_flops_share == pytest.approx(inside / (inside + head), rel=1e-12)
    assert result.saturated is not None
    assert result.underflowed is not None
    assert 0 <= result.saturated <= result.underflowed + 1e-3 < 0.05


def test_a_recipe_changes_neither_bytes_nor_first_weights():
    seen: dict[str, list[torch.Tensor]] = {}
    first: dict[str, list[torch.Tensor]] = {}
    for recipe in ("fp32", "current", "fp16"):
        one, seen[recipe] = trainer(recipe), []
        first[recipe] = [parameter.detach().clone() for parameter in one.model.parameters()]
        model: Any = one.model
        model.register_forward_pre_hook(lambda _, args, into=seen[recipe]: into.append(args[0]))
        for _ in range(3):
            one.step()
    for recipe in ("current", "fp16"):
        assert all(map(torch.equal, first["fp32"], first[recipe]))
        assert all(map(torch.equal, seen["fp32"], seen[recipe]))
    assert not torch.equal(seen["fp32"][0], seen["fp32"][1])  # and no batch twice


def test_a_seed_changes_both_and_torchs_own_random_state_neither():
    before = torch.random.get_rng_state()
    one, other = trainer("fp32", seed=0), trainer("fp32", seed=1)
    one.step()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(next(one.model.parameters()), next(other.model.parameters()))
    batches = [one.text.batch(seed, step, 4, 64) for seed in (0, 1) for step in (0, 1, 2)]
    assert len({tuple(batch.flatten().tolist()) for batch in batches}) == 6


def test_validation_is_on_other_bytes_the_last_tenth():
    text = read(None, 64)
    whole = torch.cat([text.train, text.validation])
    assert len(text.train) == len(whole) * 9 // 10
    windows = torch.cat(list(text.windows(64)))
    assert windows.shape == (64, 65)
    assert torch.equal(windows[0], whole[len(text.train) :][:65].long())
    assert torch.equal(windows[-1], whole[-65:].long())
    few = Text(torch.arange(10, dtype=torch.uint8), torch.arange(10, dtype=torch.uint8), "")
    starts = {int(row[0]) for step in range(50) for row in few.batch(0, step, 4, 8)}
    assert starts == {0, 1}, "a batch can reach every byte: 8 + 1 of 10 have two places"


def test_entropy_of_pairs_by_hand():
    """Trained on abab...: 'b' follows 'a' 50 times of 50, smoothed to 50.1 / 75.6; judged on one pair."""
    text = Text(torch.tensor([97, 98] * 50), torch.tensor([97, 98]), "")
    assert text.entropy_of_pairs() == pytest.approx(math.log((50 + 25.6) / (50 + 0.1)), rel=1e-12)


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_fp8_saves_one_byte_where_bf16_saves_two(recipe: str):
    """Inputs of the four layers of a block: width, width, width and 4 width a token; scales are the rest."""
    config = Config(size="tiny", steps=1, batch=4)
    wide, narrow = (session.activation_bytes(trainer(name, config)) for name in ("bf16", recipe))
    inputs = config.tokens_per_step * 2 * (3 * 64 + 4 * 64)
    rows = config.tokens_per_step * 2 * 4
    assert 0 <= narrow - (wide - inputs) <= 4 * 2 * rows


def test_measuring_disturbs_nothing():
    one = trainer("delayed")
    one.step()
    before = scaling_state_dict(one.model)
    weights = [parameter.detach().clone() for parameter in one.model.parameters()]
    assert session.activation_bytes(one) > 0
    counted = scaling_state_dict(one.model)
    assert session.sample(one) == session.sample(one)
    one.validate()
    after = scaling_state_dict(one.model)
    for slot, tensors in before["slots"].items():
        assert torch.equal(tensors["counts"], counted["slots"][slot]["counts"]), slot
        assert all(torch.equal(tensors[key], after["slots"][slot][key]) for key in ("live", "history")), slot
    assert all(map(torch.equal, weights, one.model.parameters()))
    assert len(one.curve.losses) == 1


def test_an_overflow_under_the_loss_scale_skips_the_step_and_is_counted():
    one = trainer("fp16")
    one.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    before = [parameter.detach().clone() for parameter in one.model.parameters()]
    one.step()
    assert one.curve.skipped == 1
    assert one.scaler.get_scale() == 2.0**59
    assert all(map(torch.equal, before, one.model.parameters()))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_sums_in_fp32_are_one_rounding_from_exact(dtype: torch.dtype, bits: int):
    """Against float64: half a unit of the dtype's significand, and FP32's sums of 64 far below it."""
    a, b = (torch.randn(8, 64).to(dtype).requires_grad_() for _ in range(2))
    with SumsInFP32(dtype):
        product = a @ b.t()
        q, k = a.view(1, 1, 8, 64), b.view(1, 1, 8, 64)
        attention = nn.functional.scaled_dot_product_attention(q, k, k)
        attention.sum().backward()
    exact = a.detach().double() @ b.detach().double().t()
    assert product.dtype == attention.dtype == dtype
    assert a.grad is not None
    assert a.grad.dtype == dtype
    bound = exact.abs() * 2.0**-bits + 64 * 2.0**-24 * (a.detach().double().abs() @ b.detach().double().abs().t())
    assert ((product.double() - exact).abs() <= bound + 2.0**-25).all()
    wide_q, wide_k = q.detach().double(), k.detach().double()
    close = nn.functional.scaled_dot_product_attention(wide_q, wide_k, wide_k)
    assert torch.allclose(attention.double(), close, atol=2.0 ** (1 - bits), rtol=2.0 ** (1 - bits))


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_a_cpu_without_16_bit_instructions_multiplies_in_fp32_and_says_so(recipe: str, monkeypatch: pytest.MonkeyPatch):
    """torch's own BF16 matmul takes 12 times as long there; the losses of both stay within a rounding of 16 bits."""
    monkeypatch.setattr(precision, "cpu_is_slow", lambda dtype: False)
    own = trainer(recipe)
    monkeypatch.setattr(precision, "cpu_is_slow", lambda dtype: True)
    wide = trainer(recipe)
    assert own.precision.ran(own.model) == "torch"
    assert wide.precision.ran(wide.model) == "torch (emulated)"
    assert wide.step() == pytest.approx(own.step(), rel=2.0**-8)


def test_the_learning_rate_rises_then_falls():
    config = Config(steps=100, lr=1.0)
    rates = [config.lr_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)  # the first of 100 / 20 steps of warm-up
    assert max(rates) == rates[4] > 0.99
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0.05 < rates[-1] < 0.06


@pytest.mark.parametrize(
    ("kind", "wrong", "told"),
    [
        (Config, {"size": "smal"}, "did you mean 'small'"),
        (Config, {"steps": 0}, "steps=0"),
        (Config, {"batch": -1}, "batch=-1"),
        (Config, {"lr": 0.0}, "lr=0.0"),
        (Config, {"lr": math.nan}, "lr=nan"),
        (Config, {"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
        (Config, {"device": "gpu"}, "device 'gpu' cannot be used here"),
        (Session, {"recipes": ("fp32", "rowise")}, "did you mean 'rowwise'"),
        (Session, {"recipes": ("fp32", "fp32")}, "want each once"),
        (Session, {"recipes": ()}, "at least one"),
        (Session, {"checkpoint_every": 0}, "checkpoint_every=0"),
    ],
)
def test_a_configuration_or_a_session_that_cannot_be(kind: type, wrong: dict, told: str):
    with pytest.raises((DemoError, UnknownName), match=told):
        kind(**wrong)


def test_a_text_of_ones_own(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes(bytes(range(256)) * 8)
    assert read(str(path), 64).digest != read(None, 64).digest
    assert run(Config(size="tiny", steps=1, batch=2, text=str(path)), "fp32").steps == 1
    path.write_bytes(b"too short")
    with pytest.raises(DemoError, match="has 9 bytes; a context of 64 needs at least 660"):
        read(str(path), 64)
    with pytest.raises(DemoError, match="No such file"):
        read(str(tmp_path / "nowhere"), 64)


class Stopper(Silent):
    """A screen before which someone stops the session, in step 3 of its second recipe."""

    def __init__(self, number: int):
        self.number = number

    def step(self, recipe: str, step: int, loss: float, tokens_per_second: float) -> None:
        if (recipe, step) == ("bf16", 3):
            signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_session_that_is_stopped_keeps_what_it_has(number: int, tmp_path):
    before = signal.getsignal(number)
    config = Config(size="tiny", steps=6, batch=2)
    outcome = train(config, Session(recipes=("fp32", "bf16", "fp16"), out=tmp_path), Stopper(number))
    assert outcome.signal == number
    assert signal.getsignal(number) is before
    assert [(result.recipe, result.steps) for result in outcome.summary.results] == [("fp32", 6), ("bf16", 3)]
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 3
    assert (tmp_path / "loss.png").exists()
    again = train(config, Session(recipes=("fp32", "bf16", "fp16"), out=tmp_path, resume=True))
    assert again.signal is None
    assert [result.steps for result in again.summary.results] == [6, 6, 6]
    assert again.summary.results[0].curve == outcome.summary.results[0].curve
    assert again.summary.results[1].curve.losses[:3] == outcome.summary.results[1].curve.losses


def test_a_run_that_diverges_is_reported_as_such(tmp_path):
    """NaN is not JSON: null in the file, a dash on screen, and nothing raised."""
    config = Config(size="tiny", steps=12, batch=2, lr=1e30)
    outcome = train(config, Session(recipes=("fp32", "current"), out=tmp_path))
    told = json.loads((tmp_path / "table.json").read_text(), parse_constant=pytest.fail)
    assert [row["validation_loss"] for row in told["rows"]] == [None, None]
    assert told["rows"][1]["difference_to_fp32_percent"] is None
    assert outcome.summary.table().row_count == 2


def test_the_difference_to_fp32_is_taken_at_equal_steps():
    config = Config(size="tiny", steps=4, batch=2)
    full, other = run(config, "fp32"), run(config, "bf16")
    short = run(config, "current", on_step=lambda step, *_: step < 2)
    rows = Summary(about(config, 0), [full, other, short]).rows()
    assert [row["steps"] for row in rows] == [4, 4, 2]
    want = 100 * (other.validation_loss - full.validation_loss) / full.validation_loss
    assert rows[0]["difference_to_fp32_percent"] == 0
    assert rows[1]["difference_to_fp32_percent"] == pytest.approx(want, rel=1e-9)
    assert rows[2]["difference_to_fp32_percent"] is None
    assert all(set(row) == set(COLUMNS) for row in rows)


def test_only_the_first_run_and_the_last_in_fp8_write_a_sample(tmp_path):
    """A sample takes as long as 20 steps, and two are shown."""
    config = Config(size="tiny", steps=2, batch=2)
    outcome = train(config, Session(recipes=("fp32", "current", "rowwise", "bf16"), out=tmp_path))
    assert [bool(result.sample) for result in outcome.summary.results] == [True, False, True, False]
    assert [result.recipe for result in outcome.summary.samples()] == ["fp32", "rowwise"]


def panel_of(draw: Callable, *arguments: Any) -> Any:
    from matplotlib.figure import Figure

    panel: Any = Figure().subplots()
    draw(panel, *arguments)
    return panel


def test_the_picture_pairs_losses_with_fp32s_of_the_same_seed_and_step():
    """Of three seeds +10 %, +20 % and +60 %: their mean is 30, its standard error sqrt(700 / 3); a NaN is left out."""
    base = run(Config(size="tiny", steps=2, batch=2), "fp32")
    change = functools.partial(replace, base)
    full = [change(seed=seed, validation_loss=loss) for seed, loss in enumerate((1.0, 2.0, 4.0))]
    current = [change(recipe="current", seed=seed, validation_loss=loss) for seed, loss in enumerate((1.1, 2.4, 6.4))]
    others = [change(recipe="auto", steps=1, validation_loss=9.0), change(recipe="auto", seed=7)]
    others.append(change(recipe="delayed", validation_loss=math.nan))
    results = [*full, *current, *others]
    found = picture.by_recipe(results)
    assert found == {"current": pytest.approx([10, 20, 60], rel=1e-9), "auto": [], "delayed": []}
    panel = panel_of(picture._difference, results)
    assert [text.get_text() for text in panel.texts] == ["+30.00 ± 15.28"]
    assert [tick.get_text() for tick in panel.get_yticklabels()] == ["current"]
    assert "mean of 3 seeds" in panel.get_title(loc="left")
    panel = panel_of(picture._difference, [full[0], current[0]])
    assert [text.get_text() for text in panel.texts] == ["+10.00"], "one seed has no error"
    assert "one seed" in panel.get_title(loc="left")
    panel = panel_of(picture._difference, current)
    assert [text.get_text() for text in panel.texts] == ["no run beside one of fp32"]


def test_the_picture_shows_each_format_from_its_step_on():
    from matplotlib.colors import to_rgb

    base = run(Config(size="tiny", steps=1, batch=2), "fp32")
    changes = [
        {"step": 1, "slot": "blocks.0.up.input", "before": "E5M2/tensor", "after": "E4M3/tensor"},
        {"step": 3, "slot": "blocks.0.up.input", "before": "E4M3/tensor", "after": "E4M3/tensor (wgrad E4M3/row)"},
        {"step": 4, "slot": "blocks.0.up.weight", "before": "E4M3/tensor", "after": "BF16"},
    ]
    formats = dict.fromkeys((f"blocks.0.up.{role}" for role in picture.ROLES), "E4M3/tensor")
    panel = panel_of(picture._formats, replace(base, recipe="auto", steps=5, decisions=changes, formats=formats))
    e5m2, e4m3, none = (to_rgb(colour(cast)) for cast in ("E5M2/tensor", "E4M3/tensor", "BF16"))  # as on the page
    shown = [[e5m2, *[e4m3] * 4], [*[e4m3] * 4, none], [e4m3] * 5]
    assert panel.images[0].get_array().data == pytest.approx(np.array(shown))
    assert [tick.get_text() for tick in panel.get_yticklabels()] == ["0.up"]


def test_a_run_under_auto_knows_the_cast_of_every_slot():
    result = run(Config(size="tiny", steps=2, batch=2), "auto")
    layers = [f"blocks.{block}.{layer}" for block in range(2) for layer in ("qkv", "proj", "up", "down")]
    assert list(result.formats) == [f"{layer}.{role}" for layer in layers for role in picture.ROLES]
    assert result.formats["blocks.0.qkv.input"] == "E4M3/tensor"
    assert run(Config(size="tiny", steps=1, batch=2), "current").formats == {}
