"""Models as people have them, from transformers and peft: converted whole, trained, generated from, saved, wrapped."""

import copy
from typing import Any

import pytest
import tiny_models as tiny
import torch
from support import converted, same, state_of, tables
from torch import nn
from transformers.pytorch_utils import Conv1D

import fp8engine as fe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def report(model: nn.Module) -> dict[str, Any]:
    return {row["name"]: row for row in fe.inspect(model).layers}


def train(model: nn.Module, steps: int = 3) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for ids in tiny.tokens(2 * steps).split(2):
        loss = tiny.loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


MODELS = [tiny.gpt2, tiny.llama, tiny.bert, tiny.albert, tiny.mixtral]


@pytest.mark.parametrize("build", MODELS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise"])
def test_a_model_keeps_its_checkpoint_and_close_to_its_loss(build, recipe: str):
    plain = build().eval()
    model = converted(copy.deepcopy(plain), recipe)
    ids = tiny.tokens()
    with torch.no_grad():
        want, found = tiny.loss_of(plain, ids), tiny.loss_of(model, ids)
    # Random weights: logits near 0, cross entropy near log(classes) with a slope of at most 1 to 6 % noise on them.
    assert found.item() == pytest.approx(want.item(), rel=0.01)
    assert found != want
    assert [(k, v.shape, v.dtype) for k, v in model.state_dict().items()] == [
        (k, v.shape, v.dtype) for k, v in plain.state_dict().items()
    ]
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
    losses = train(model.train())
    assert all(torch.isfinite(torch.tensor(losses)))
    assert fe.inspect(model).totals["never_ran"] == 0
    assert fe.inspect(model).totals["fp8_flops_share"] > 0


def test_gpt2_conv1d_is_the_linear_of_its_transposed_weight():
    conv = Conv1D(24, 16)
    nn.init.normal_(conv.bias)
    linear = nn.Linear(16, 24)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    shape = conv.weight.shape
    a, b = converted(nn.Sequential(conv), "rowwise"), converted(nn.Sequential(linear), "rowwise")
    x = torch.randn(2, 5, 16)
    grads = []
    for model in (a, b):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.square().sum().backward()
        grads.append((y, leaf.grad, model[0].bias.grad))
    assert all(torch.equal(p, q) for p, q in zip(*grads, strict=True))
    assert conv.weight.grad is not None
    assert linear.weight.grad is not None
    assert torch.equal(conv.weight.grad.t(), linear.weight.grad)
    assert isinstance(conv, Conv1D)
    assert conv.weight.shape == shape == (16, 24)
    assert repr(conv) == "Conv1D(nf=24, nx=16, recipe=rowwise (E4M3xE4M3, grad E4M3))"


def test_gpt2_tie_is_kept_and_the_head_left_unless_named():
    model = converted(tiny.gpt2())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert report(model)["lm_head"]["reason"].startswith("output head")
    assert all(row["kind"] == "Float8Conv1D" for name, row in report(model).items() if name != "lm_head")
    model = converted(tiny.gpt2(), overrides={"lm_head": "rowwise"})
    assert model.lm_head.weight is model.transformer.wte.weight
    assert isinstance(model.get_output_embeddings(), fe.Linear)
    train(model)
    assert report(model)["lm_head"]["recipe"] == "rowwise"
    assert report(model)["lm_head"]["ran"]
    assert model.lm_head.weight is model.transformer.wte.weight


def test_generate_resize_and_tie_after_convert():
    model = converted(tiny.gpt2()).eval()
    ids = tiny.tokens(1, 4)
    out = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 8)
    assert torch.equal(out[:, :4], ids)
    model.resize_token_embeddings(tiny.VOCABULARY + 8, mean_resizing=False)
    model.tie_weights()
    assert model.lm_head.weight.shape == (tiny.VOCABULARY + 8, tiny.WIDTH)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.isfinite(model(tiny.tokens()).logits).all()
    assert model.dtype == torch.float32


def test_save_pretrained_and_back(tmp_path):
    model = converted(tiny.llama())
    train(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert type(loaded.model.layers[0].mlp.up_proj) is nn.Linear
    assert same(list(loaded.parameters()), list(model.parameters()))


def test_llama_inputs_shared_by_q_k_v_and_gate_up():
    model = converted(tiny.llama(), "delayed")
    train(model)
    state = fe.scaling_state(model)
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q, k, v = (state[f"model.layers.0.{name}.input"] for name in names)
    assert torch.equal(q.history, k.history)
    assert torch.equal(q.history, v.history)
    assert q.scale == k.scale == v.scale
    assert (q.history[:2] > 0).all()


def test_mixtral_experts_run_in_fp8_and_are_listed_with_their_share():
    model = converted(tiny.mixtral())
    train(model)
    rows = report(model)
    experts = {name: row for name, row in rows.items() if "experts" in name}
    assert len(experts) == 2 * 2, "gate_up_proj and down_proj of two layers"
    for row in experts.values():
        assert len(row["shape"]) == 3
        assert (row["recipe"], row["experts"]) == ("current", [1, 2])
        assert f"1 of 2 a token, {row['flops_share']:.1%} of the model's linear FLOPs" in row["reason"]
    assert sum(row["flops_share"] for row in experts.values()) > 0.5
    assert fe.inspect(model).totals["fp8_flops_share"] > 0.85, "all but the head and the routers"


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_albert_calls_one_layer_several_times(recipe: str):
    model = converted(tiny.albert(), recipe)
    train(model, steps=2)
    calls = {name: int(slot.calls) for name, slot in fe.scaling_state(model).items() if name.endswith("ffn.input")}
    assert list(calls.values()) == [3 * 2]
    history = tables(model)[0]
    if recipe == "delayed":
        assert ((history > 0).sum(0) <= 1).all(), "two steps: one entered, the other waits; not one a call"


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_sixteen_bit_models(recipe: str):
    model = converted(tiny.llama().bfloat16(), recipe)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(torch.isfinite(torch.tensor(train(model))))
    assert model(tiny.tokens()).logits.dtype == torch.bfloat16


def test_trainer_style_autocast_and_grad_scaler():
    model = converted(tiny.gpt2(), "delayed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    ids = tiny.tokens()
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = tiny.loss_of(model, ids)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5, "it learns its one batch by heart"
    assert scaler.get_scale() == 2.0**8, "no step was skipped"
    assert state_of(model).delayed


def test_heads_of_transformers_are_left():
    for build, head in ((tiny.bert, "classifier"), (tiny.albert, "classifier"), (tiny.llama, "lm_head")):
        model = converted(build())
        assert report(model)[head]["reason"].startswith("output head")
        assert sum(row["recipe"] == "none" for row in report(model).values()) == 1
