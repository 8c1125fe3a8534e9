"""Where fe.convert(fuse=True) runs parts one by one, and says so: hooks, adapters, dropout, unknown models."""

from typing import Any

import pytest
import torch
import transformers
from hf_families import FAMILIES, Family
from hf_fusing import groups, near, step
from support import converted, same, sqnr, tables
from torch import nn

import fp8engine as fe
from fp8engine.errors import FusionWarning, StateError, StrictError
from fp8engine.nn.lazy import Lazy
from fp8engine.nn.linear import Float8Module

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

PLACES = ["input_layernorm", "self_attn", "self_attn.q_proj", "mlp", "mlp.act_fn", "mlp.down_proj"]
HOOKS: dict[str, Any] = {
    "forward": lambda m, note: m.register_forward_hook(lambda m, args, y: note(y)),
    "forward pre": lambda m, note: m.register_forward_pre_hook(
        lambda m, args, kw: note((*args, *kw.values())[0]), with_kwargs=True
    ),
    "backward": lambda m, note: m.register_full_backward_hook(lambda m, gi, go: note(go[0])),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_sees_what_it_saw_and_its_group_runs_apart(place: str, hook: str):
    family, seen = FAMILIES["llama"], []
    torch.manual_seed(1)
    one = converted(family.build(num_hidden_layers=1))
    torch.manual_seed(1)
    two = converted(family.build(num_hidden_layers=1), fuse=True)
    batch = family.batch()
    removable = []
    for model in (one, two):
        module = model.model.layers[0].get_submodule(place)
        removable.append(HOOKS[hook](module, lambda x: seen.append(x[0] if isinstance(x, tuple) else x) and None))
    first, second = step(one, batch), step(two, batch)
    assert all(type(x) is torch.Tensor for x in seen), seen
    assert len(seen) == 2
    assert sqnr(seen[0], seen[1]) > 15
    attention, mlp = groups(two).values()
    apart, together = (attention, mlp) if place in PLACES[:3] else (mlp, attention)
    assert (apart, together) == (f"a hook on {place.rpartition('.')[2]} looks on", "")
    assert f"but run apart: {apart}" in fe.inspect(two).table()
    assert sqnr(first[0], second[0]) > 20
    removable[1].remove()
    step(two, batch)
    assert set(groups(two).values()) == {""}


def test_outputs_that_transformers_captures_keep_nothing_apart():
    """Its hooks on attention stay after the first call that asked for attentions; they read what attention returns."""
    model = converted(FAMILIES["llama"].build(attn_implementation="eager"), "rowwise")
    batch = FAMILIES["llama"].batch()
    want = step(model, batch)
    model.zero_grad()
    captured = model(**batch, output_attentions=True, output_hidden_states=True)
    assert [type(x) for x in (*captured.attentions, *captured.hidden_states)] == [torch.Tensor] * 5
    assert model.model.layers[0].self_attn._forward_hooks
    assert same(want, step(model, batch))
    assert set(groups(model).values()) == {""}


def test_all_apart_is_level_1_bit_for_bit():
    family = FAMILIES["qwen3"]
    one, seen = converted(family.build(), "delayed", fuse=False), []
    two = converted(_again(family, one), "delayed", fuse=True)
    batch = family.batch()
    with torch.nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(type(y))):
        found = step(two, batch)
    want = step(one, batch)
    assert same(want, found)
    assert same(tables(one), tables(two))
    assert not any(issubclass(kind, Lazy) for kind in seen)
    assert set(groups(two).values()) == {"a hook on all modules looks on"}


def _again(family: Family, model: nn.Module) -> nn.Module:
    other = family.build()
    other.load_state_dict(model.state_dict())
    return other


def test_hooks_on_a_block_change_nothing():
    model, seen = converted(FAMILIES["llama"].build(), fuse=True), []
    model.model.layers[0].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].shape))
    model.model.layers[0].register_forward_hook(lambda m, args, y: seen.append(y.shape))
    step(model, FAMILIES["llama"].batch())
    assert seen == [(4, 12, 32)] * 2
    assert set(groups(model).values()) == {""}


@pytest.mark.parametrize("order", ["convert first", "adapters first"])
def test_layers_with_adapters_run_apart(order: str):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    family = FAMILIES["llama"]
    runs = []
    for fuse in (False, True):
        torch.manual_seed(2)
        model = family.build()
        if order == "convert first":
            model = converted(model, fuse=fuse)
        torch.manual_seed(3)
        model = peft.get_peft_model(model, config)
        if order == "adapters first":
            model = converted(model, fuse=fuse)
        torch.manual_seed(4)
        runs.append((step(model, family.batch()), model))
    (want, _), (found, model) = runs
    near(family, want, found) if not same(want, found) and sqnr(want[0], found[0]) < 40 else None
    assert sqnr(want[0], found[0]) > 15
    told = {
        row["name"].removeprefix("base_model.model.model.layers.0."): row["fused"] for row in fe.inspect(model).layers
    }
    assert "adapter" in told["self_attn.q_proj.base_layer"]
    assert "adapter" in told["self_attn.k_proj"]
    assert (
        told["mlp.down_proj"]
        == "fused: post_attention_layernorm + mlp.gate_proj + mlp.up_proj + mlp.act_fn + mlp.down_proj"
    )
    if order == "convert first":
        merged = model.merge_and_unload()
        with torch.no_grad():
            merged(**family.batch())
        assert set(groups(merged).values()) == {""}, "together again without the adapters"


def test_what_is_not_recognised_is_said_once_and_refused_when_strict():
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    model = transformers.BloomForCausalLM(config)
    with pytest.raises(StrictError, match=r"fuse=True knows no structure: model_type 'bloom' is in no row"):
        fe.convert(model, fuse=True, strict=True)
    assert not any(isinstance(m, Float8Module) for m in model.modules()), "nothing was changed"
    with pytest.warns(
        FusionWarning, match=r"fuse=True: model_type 'bloom' is in no row of .*: every layer runs by itself"
    ) as told:
        converted(model, fuse=True)
    assert len([w for w in told if w.category is FusionWarning]) == 1
    rows = [row for row in fe.inspect(model).layers if row["recipe"] != "none"]
    assert len(rows) == 4
    assert {row["fused"] for row in rows} == {"not fused: model_type 'bloom' is in no row of fp8engine.hf.FAMILIES"}
    by_default = fe.inspect(converted(transformers.BloomForCausalLM(config))).table()
    assert "0 layers run fused with their norms or activations; 4 do not: model_type 'bloom' is in no row" in by_default
    with pytest.warns(FusionWarning, match="Sequential has no config: describe takes a model of transformers"):
        converted(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)), fuse=True)


def test_a_neighbour_in_another_precision_keeps_its_group_apart():
    model = converted(FAMILIES["llama"].build(), overrides={"*.k_proj": "bf16", "*.0.mlp.down_proj": "bf16"}, fuse=True)
    step(model, FAMILIES["llama"].batch())
    rows = {row["name"]: row["fused"] for row in fe.inspect(model).layers}
    assert rows["model.layers.0.self_attn.q_proj"] == "not fused: self_attn.k_proj beside it has recipe bf16"
    assert rows["model.layers.0.mlp.gate_proj"] == "fused: post_attention_layernorm + mlp.gate_proj + mlp.up_proj"
    assert rows["model.layers.1.mlp.gate_proj"].endswith("mlp.act_fn + mlp.down_proj")


def test_dropout_between_activation_and_down_runs_apart_in_training():
    family = FAMILIES["t5"]
    model = converted(family.build(dropout_rate=0.1), fuse=True)
    step(model, family.batch())
    assert set(groups(model).values()) == {""}, "nothing is dropped in evaluation"
    step(model.train(), family.batch())
    said = groups(model)
    assert {why for name, why in said.items() if "wo" in name} == {"its result was read by other code too"}
    assert {why for name, why in said.items() if "wo" not in name} == {""}


@pytest.fixture
def inside():
    """A block of a fused model as its own forward finds it: placeholders are made inside of a block alone."""
    model: Any = converted(FAMILIES["llama"].build())
    block = model.model.layers[0]
    block.forwards.append(None)
    return block


def test_parts_called_by_themselves_return_tensors():
    for name, path in (
        ("llama", "model.layers.0.input_layernorm"),
        ("bert", "bert.encoder.layer.0.intermediate.dense"),
    ):
        model = converted(FAMILIES[name].build())
        step(model, FAMILIES[name].batch())
        assert type(model.get_submodule(path)(torch.randn(2, 3, 32))) is torch.Tensor


def test_lazy_results_answer_as_tensors_do(inside):
    x = torch.randn(2, 3, 32)
    norm: Any = inside.input_layernorm(x)
    assert type(norm).__name__ == "Normed"
    assert (norm.shape, norm.size(-1), norm.dtype, norm.device) == (x.shape, 32, x.dtype, x.device)
    want = nn.functional.rms_norm(x, (32,), inside.input_layernorm.weight, 1e-6)
    for found in (
        norm + 0,
        norm * 1,
        1 * norm,
        torch.cat([norm, norm])[:2],
        norm[:],
        norm.float(),
        norm.clone(),
        norm // 1 + norm % 1,
    ):
        torch.testing.assert_close(found, want)


def test_a_result_that_other_code_has_had_is_what_the_layers_read(inside):
    """It may have written it, or wait for its gradient."""
    x, layer = torch.randn(2, 3, 32), inside.mlp.gate_proj
    for write in (lambda y: y.mul_(2), lambda y: y.__setitem__((..., 0), 0.0)):
        norm, want = inside.post_attention_layernorm(x), inside.post_attention_layernorm(x).clone()
        write(norm)
        write(want)
        assert torch.equal(layer(norm) + 0, layer(want))
    norm, seen = inside.post_attention_layernorm(x), []
    assert norm.grad is None
    norm.register_hook(seen.append)
    gate, up = layer(norm), inside.mlp.up_proj(norm)
    act = inside.mlp.act_fn(gate)
    act.retain_grad()
    inside.mlp.down_proj(act * up).sum().backward()
    assert [g.shape for g in seen] == [x.shape]
    assert act.grad.abs().sum() > 0


def test_an_input_written_in_place_is_refused(inside):
    x = torch.randn(2, 3, 32)
    norm = inside.input_layernorm(x)
    x += 1
    with pytest.raises(StateError, match=r"input_layernorm .*written in place before the norm's result was read"):
        inside.self_attn.q_proj(norm)


def test_a_value_read_without_gradients_first_keeps_them(inside):
    x = torch.randn(2, 3, 32, requires_grad=True)
    norm = inside.input_layernorm(x)
    with torch.no_grad():
        assert norm.std() > 0
    norm.sum().backward()
    assert x.grad is not None


class _Swish(torch.autograd.Function):
    """silu(gate) * up as other libraries fuse it; a placeholder given to a Function would get no gradient."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, dy):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            y = nn.functional.silu(leaves[0]) * leaves[1]
        return torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("patched", ["before", "after"])
def test_another_librarys_forward_gets_tensors_and_keeps_its_gradients(patched: str, monkeypatch: pytest.MonkeyPatch):
    """Liger and others replace forwards of transformers' classes."""
    kind: Any = transformers.models.llama.modeling_llama.LlamaMLP
    theirs = lambda self, x: self.down_proj(_Swish.apply(self.gate_proj(x), self.up_proj(x)))  # noqa: E731 - one use
    family = FAMILIES["llama"]
    if patched == "before":
        monkeypatch.setattr(kind, "forward", theirs)
    one = converted(family.build(), fuse=False)
    two = converted(_again(family, one))
    monkeypatch.setattr(kind, "forward", theirs)
    batch = family.batch(rows=32)
    want, found = step(one, batch), step(two, batch)
    assert min(map(sqnr, want, found)) > 60, "as in test_fuse.py: the order of FP32 sums"
    assert list(groups(two).values()) == ["", f"the forward of LlamaMLP is of {__name__}"] * 2


def test_a_forward_of_an_instance_is_called():
    """As accelerate puts its hooks: the module's forward is wrapped, and stays the one that runs."""
    model: Any = converted(FAMILIES["llama"].build(), fuse=True)
    layer, seen = model.model.layers[0].self_attn.v_proj, []
    inner = layer.forward
    layer.forward = lambda x: (seen.append(type(x)), inner(x))[1]
    step(model, FAMILIES["llama"].batch())
    assert seen == [torch.Tensor]
    assert list(groups(model).values()) == ["v_proj has a forward of its own", "", "", ""]
