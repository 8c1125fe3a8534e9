"""LoRA by peft, added before or after convert: the base frozen in FP8, the adapters in 16 or 32 bits, merging seen."""

from typing import Any

import peft
import pytest
import tiny_models as tiny
import torch
from support import converted, same, tables
from torch import nn

import fp8engine as fe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:fan_in_fan_out")
TARGETS = {tiny.llama: ["q_proj", "v_proj", "up_proj"], tiny.gpt2: ["c_attn", "c_fc"]}


def with_lora(model: nn.Module, targets: list[str]) -> Any:
    torch.manual_seed(7)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, config)


def build(order: str, make, recipe: str = "current") -> Any:
    torch.manual_seed(3)
    model = make()
    if order == "convert first":
        return with_lora(converted(model, recipe), TARGETS[make])
    return converted(with_lora(model, TARGETS[make]), recipe)


def kinds(model: nn.Module) -> dict[str, bool]:
    """Linear layer -> in FP8."""
    return {row["name"].removeprefix("base_model.model."): row["recipe"] != "none" for row in fe.inspect(model).layers}


@pytest.mark.parametrize("make", TARGETS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("order", ["convert first", "adapters first"])
def test_the_base_is_fp8_and_the_adapters_are_not(order: str, make):
    model = build(order, make)
    for name, fp8 in kinds(model).items():
        assert fp8 == (".lora_" not in name and "lm_head" not in name), name
    assert sum(".lora_A" in name for name in kinds(model)) == 2 * len(TARGETS[make])


@pytest.mark.parametrize("make", TARGETS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_both_orders_train_alike_and_leave_the_base_alone(recipe: str, make):
    runs = []
    for order in ("convert first", "adapters first"):
        model = build(order, make, recipe).eval()  # no dropout
        frozen = [p.clone() for p in model.parameters() if not p.requires_grad]
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        torch.manual_seed(5)
        losses = []
        for ids in tiny.tokens(8).split(2):
            loss = tiny.loss_of(model, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert same([p for p in model.parameters() if not p.requires_grad], frozen)
        weights = [slot for name, slot in fe.scaling_state(model).items() if name.endswith(".weight")]
        # Under predicted scales once a step, until their amax fills the window and the scale stays.
        calls = 1 if recipe == "current" else len(losses)
        assert all(int(slot.calls) == calls for slot in weights), "frozen weights are quantised once"
        assert all(slot.scale < 1 for slot in weights), "from the tensor itself, not 1 by default"
        runs.append(losses)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("make", TARGETS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("order", ["convert first", "adapters first"])
def test_merging_is_seen_by_the_next_forward(order: str, make):
    model, ids = build(order, make).eval(), tiny.tokens()
    with torch.no_grad():
        unmerged = model(ids).logits
        with model.disable_adapter():
            stale = model(ids).logits  # what a kept weight would compute after merging
        merged = model.merge_and_unload()
        found = merged(ids).logits
        plain = make().eval()
        plain.load_state_dict(merged.state_dict(), strict=True)
        want = plain(ids).logits
    error = (found - want).norm() / want.norm()
    assert error < 0.1, "FP8 noise through two layers, not more"
    assert (stale - want).norm() / want.norm() > 3 * error, "the adapters matter here, so a stale weight would show"
    assert (unmerged - want).norm() / want.norm() < 0.1


def test_delayed_scales_move_though_peft_passes_the_root_by():
    model = build("convert first", tiny.llama, "delayed")
    for ids in tiny.tokens(6).split(2):
        tiny.loss_of(model, ids).backward()
    history_HS = tables(model)[0]
    inputs = history_HS[:, 0::3]
    assert ((inputs > 0).sum(0) == 2).all(), "three steps: two entered, the third waits"
