"""Checkpoints of transformers, both ways, resized embeddings, and peft's LoRA before and after convert.

Other adapters: tests/convert/test_convert_adapters.py.
"""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hf_families import FAMILIES, VOCABULARY, Family
from hf_fusing import logits
from safetensors import safe_open
from support import converted, same, tables
from torch import nn

import fp8engine as fe
from fp8engine.convert.record import REPLACED

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
GENERATES = {name: family for name, family in FAMILIES.items() if family.generates}
language_models = pytest.mark.parametrize("family", GENERATES.values(), ids=GENERATES)


def contents(folder: Path) -> dict[str, tuple]:
    """What the checkpoint's one file holds: name -> (dtype, shape)."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {key: (file.get_slice(key).get_dtype(), *file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def output(model: Any, batch: dict) -> torch.Tensor:
    with torch.no_grad():
        return logits(model(**batch))


@every_family
def test_a_converted_model_saves_what_the_plain_one_saves(family: Family, tmp_path: Path):
    plain = family.build()
    model = converted(copy.deepcopy(plain), "delayed")
    batch = family.batch()
    model(**batch).loss.backward()
    want = output(plain, batch)  # transformers also notes in its config what a classifier was trained as
    model.save_pretrained(tmp_path / "converted")
    plain.save_pretrained(tmp_path / "plain")
    assert contents(tmp_path / "converted") == contents(tmp_path / "plain")
    one, other = (tmp_path / folder / "config.json" for folder in ("converted", "plain"))
    assert one.read_text() == other.read_text()
    loaded = type(plain).from_pretrained(tmp_path / "converted").eval()
    assert not any(hasattr(module, "numerics") for module in loaded.modules())
    assert same(list(loaded.state_dict().values()), list(plain.state_dict().values()))
    assert torch.equal(output(loaded, batch), want)


@every_family
def test_a_plain_checkpoint_loads_and_converts(family: Family, tmp_path: Path):
    """From the file and then converted, or converted and then from the file: the same bits out."""
    plain = family.build()
    plain.save_pretrained(tmp_path)
    batch = family.batch()
    want = output(converted(copy.deepcopy(plain)), batch)
    loaded = converted(type(plain).from_pretrained(tmp_path, device_map="cpu").eval())
    assert torch.equal(output(loaded, batch), want)
    other = converted(family.build())
    other.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(output(other, batch), want)


@language_models
def test_resize_token_embeddings(family: Family):
    plain = family.build()
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    model = converted(plain)
    ran = [row["name"] for row in fe.inspect(model).layers if row["recipe"] == "current"]
    model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    model.tie_weights()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert len(head.weight) == len(embedding.weight) == VOCABULARY + 8
    assert (head.weight is embedding.weight) is tied
    assert output(model, family.batch()).shape[-1] == VOCABULARY + 8
    rows = {row["name"]: row for row in fe.inspect(model).layers}
    assert [name for name, row in rows.items() if row["recipe"] == "current" and row["ran"]] == ran
    (row,) = [row for row in rows.values() if row["shape"][0] == VOCABULARY + 8]
    assert row["reason"].startswith("output head")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_head_asked_into_fp8_and_then_resized(name: str):
    """An untied head is a new nn.Linear after that, and the report says so; a tied one only changes its weight."""
    model = converted(FAMILIES[name].build(), overrides={"lm_head": "rowwise"})
    model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    output(model, FAMILIES[name].batch())
    row = {row["name"]: row for row in fe.inspect(model).layers}["lm_head"]
    if name == "llama":
        assert (row["recipe"], row["reason"]) == ("none", REPLACED)
    else:
        assert (row["recipe"], row["ran"], row["shape"]) == ("rowwise", True, [VOCABULARY + 8, 32])


RECIPE_OF: dict[str, str] = dict.fromkeys(("mistral", "phi3", "opt", "bert", "vit", "t5", "qwen2_moe"), "current")
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


@pytest.mark.filterwarnings("ignore::UserWarning")
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
            assert ((tables(model)[0][:, 0::4] > 0).sum(0) == 2).all(), "three steps: two entered, the third waits"
        runs.append([loss.detach(), *trained])
    assert same(*runs)


@pytest.mark.filterwarnings("ignore::UserWarning")
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
