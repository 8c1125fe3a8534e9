"""peft's LoRA on families of transformers, before and after convert, saved and merged; others: tests/convert."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hf_families import FAMILIES
from support import converted, same, tables
from torch import nn

import fp8engine as fe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
RECIPE_OF = dict.fromkeys(("mistral", "phi3", "opt", "bert", "vit", "t5", "qwen2_moe"), "current")
RECIPE_OF["gpt2"] = "delayed"  # its layers are Conv1D
ORDERS = ["convert first", "adapters first"]


def adapted(model: nn.Module, kind: str) -> Any:
    torch.manual_seed(7)
    task = {"causal": "CAUSAL_LM", "sequences": "SEQ_2_SEQ_LM"}.get(kind)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type=task, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def build(name: str, order: str) -> Any:
    torch.manual_seed(3)
    model, kind, recipe = FAMILIES[name].build(), FAMILIES[name].kind, RECIPE_OF[name]
    if order == "convert first":
        return adapted(converted(model, recipe), kind).eval()
    return converted(adapted(model, kind), recipe).eval()


@pytest.mark.parametrize("name", RECIPE_OF)
def test_both_orders_compute_and_train_the_same(name: str):
    runs, batches, recipe = [], [FAMILIES[name].batch() for _ in range(3)], RECIPE_OF[name]
    for order in ORDERS:
        model = build(name, order)
        frozen = [p.clone() for p in model.parameters() if not p.requires_grad]
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
            optimizer.step()
            optimizer.zero_grad()
        assert same([p for p in model.parameters() if not p.requires_grad], frozen)
        rows = fe.inspect(model).layers
        adapters = [row for row in rows if ".lora_" in row["name"]]
        assert adapters
        assert {row["recipe"] for row in adapters} == {"none"}
        bases = [row for row in rows if row["name"].endswith("base_layer") and "output head" not in row["reason"]]
        assert {row["recipe"] for row in bases if "router" not in row["reason"]} == {recipe}
        assert recipe != "current" or {row["weight"]["calls"] for row in bases if row["recipe"] == recipe} == {1}, (
            "kept"
        )
        if recipe == "delayed":  # histories move, though peft passes the root by
            assert ((tables(model)[0][:, 0::3] > 0).sum(0) == 2).all(), "three steps: two entered, the third waits"
        runs.append([loss.detach(), *trained])
    assert same(*runs)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["mistral", "bert", "gpt2"])
def test_an_adapter_is_saved_loaded_and_merged(name: str, order: str, tmp_path: Path):
    model, batch = build(name, order), FAMILIES[name].batch()
    with torch.no_grad():
        want = model(**batch).logits
        model.save_pretrained(tmp_path)
        torch.manual_seed(3)
        loaded = peft.PeftModel.from_pretrained(converted(FAMILIES[name].build(), RECIPE_OF[name]), tmp_path).eval()
        assert torch.equal(loaded(**batch).logits, want)
        merged = model.merge_and_unload()
        found = merged(**batch).logits
        plain = FAMILIES[name].build()
        plain.load_state_dict(merged.state_dict(), strict=True)
        exact = plain(**batch).logits
    assert {row["recipe"] for row in fe.inspect(merged).layers} == {RECIPE_OF[name], "none"}
    assert (found - exact).norm() < 0.2 * exact.norm(), "FP8 noise of two blocks"
