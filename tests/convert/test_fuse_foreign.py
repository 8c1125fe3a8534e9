"""Producers beside other people's code: hooks, adapters, norms and MLPs of no library, writes in place.

Each test gives two copies of a model, with fuse=False and by default, to the same code of a stranger: both compute the
same (`alike`: but for the order of FP32 sums).
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hf_families import FAMILIES
from hf_fusing import alike, block, pair, producers, sources, step
from probe_modules import Gated, K, LayerNorm1P, Packed, Rms, TimmGluMlp
from support import converted, same, sqnr
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
LLAMA = FAMILIES["llama"]

PLACES = ["input_layernorm", "self_attn", "self_attn.q_proj", "mlp", "mlp.act_fn", "mlp.down_proj", ""]
HOOKS: dict[str, Any] = {
    "forward": lambda m, note: m.register_forward_hook(lambda m, args, y: note(y)),
    "forward pre": lambda m, note: m.register_forward_pre_hook(
        lambda m, args, kw: note((*args, *kw.values())[0]), with_kwargs=True
    ),
    "backward": lambda m, note: m.register_full_backward_hook(lambda m, gi, go: note(go[0])),
    "backward pre": lambda m, note: m.register_full_backward_pre_hook(lambda m, go: note(go[0])),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_sees_what_it_saw(place: str, hook: str):
    models, seen = pair("llama"), ([], [])
    for model, kept in zip(models, seen, strict=True):
        note = lambda x, kept=kept: kept.append(x[0] if isinstance(x, tuple) else x)  # noqa: E731
        HOOKS[hook](block(model).get_submodule(place), note)
    assert alike(LLAMA, models, seen=seen)
    assert [type(x) for kept in seen for x in kept] == [torch.Tensor] * 2
    found = sources(models[1])
    if "backward" not in hook:  # torch makes other tensors of what a module with those takes and returns
        assert found["model.layers.0.self_attn.v_proj"] == "input_layernorm", "codes are read all the same"
        assert bool(found["model.layers.0.mlp.down_proj"]) is (place != "mlp.act_fn"), "there its own forward runs"


CHANGES: dict[str, Any] = {
    "another result": ("input_layernorm", lambda m: m.register_forward_hook(lambda m, args, y: 2 * y)),
    "its result, in place": ("input_layernorm", lambda m: m.register_forward_hook(lambda m, args, y: _double(y))),
    "what q reads, between": ("self_attn.q_proj", lambda m: m.register_forward_hook(lambda m, x, y: _double(*x))),
    "what the MLP multiplies": ("mlp.act_fn", lambda m: m.register_forward_hook(lambda m, args, y: 2 * y)),
    "the product": ("mlp.down_proj", lambda m: m.register_forward_pre_hook(lambda m, x: (2 * x[0],))),
    "a gradient": ("post_attention_layernorm", lambda m: m.register_full_backward_hook(lambda m, gi, go: (2 * gi[0],))),
}


def _double(x: torch.Tensor) -> None:
    x.mul_(2)


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_hook_changes_is_what_follows(change: str):
    """Also in place, between two layers that read one norm."""
    models, (place, put), batch = pair("llama"), CHANGES[change], LLAMA.batch()
    plain = step(models[1], batch)
    for model in models:
        put(block(model).get_submodule(place))
    assert alike(LLAMA, models)
    models[1].zero_grad()
    assert not same(step(models[1], batch)[1:], plain[1:])


def test_outputs_that_transformers_captures():
    """Its hooks on attention stay after the first call that asked for attentions."""
    model = converted(LLAMA.build(attn_implementation="eager"), "rowwise")
    batch = LLAMA.batch()
    want = step(model, batch)
    model.zero_grad()
    captured = model(**batch, output_attentions=True, output_hidden_states=True)
    assert [type(x) for x in (*captured.attentions, *captured.hidden_states)] == [torch.Tensor] * 5
    assert model.model.layers[0].self_attn._forward_hooks
    assert same(want, step(model, batch))


@pytest.mark.parametrize("order", ["convert first", "adapters first"])
def test_adapters_around_layers_that_read_producers(order: str):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "gate_proj", "down_proj"], init_lora_weights=False)
    models = []
    for fuse in (False, None):
        torch.manual_seed(2)
        model = LLAMA.build() if order == "adapters first" else converted(LLAMA.build(), "rowwise", fuse=fuse)
        torch.manual_seed(3)
        model = peft.get_peft_model(model, config)
        models.append(model if order == "convert first" else converted(model, "rowwise", fuse=fuse))
    optimizers = [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1) for model in models]
    assert alike(LLAMA, models)
    for optimizer in optimizers:
        optimizer.step()
    assert alike(LLAMA, models), "trained alike"
    found = {name.removeprefix("base_model.model.model.layers."): by for name, by in sources(models[1]).items()}
    assert found["1.self_attn.q_proj.base_layer"] == found["1.self_attn.k_proj"] == "input_layernorm"
    assert found["1.mlp.gate_proj.base_layer"] == found["1.mlp.up_proj"] == "post_attention_layernorm"
    assert found["1.mlp.down_proj.base_layer"] == "mlp"
    if order == "convert first":
        merged = [model.merge_and_unload().requires_grad_() for model in models]
        assert alike(LLAMA, merged)
        assert sources(merged[1])["model.layers.1.mlp.down_proj"] == "mlp"


class Foreign(nn.Module):
    """Norms and MLPs of no library, in a residual block."""

    def __init__(self, norm: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(self, x):
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("mlp", [Gated, Packed, TimmGluMlp, lambda: TimmGluMlp(nn.SiLU, gate_last=False)])
@pytest.mark.parametrize("norm", [Rms, lambda: LayerNorm1P(K), lambda: nn.RMSNorm(K, 1e-6, False)])
def test_foreign_modules_are_recognised_by_their_numbers(norm: Callable, mlp: Callable):
    plain, found = Foreign(norm(), mlp()), []
    with torch.no_grad():
        for parameter in plain.norm.parameters():
            parameter.uniform_(0.2, 0.5)
    for fuse in (False, None):
        model, x = converted(copy.deepcopy(plain), "rowwise", fuse=fuse), torch.linspace(-2, 3, 24 * K).view(2, 12, K)
        x.requires_grad_()
        y = model(x)
        y.square().mean().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert producers(model) == ["norm", "mlp"]
    # The order of FP32 sums may move a few of 1152 codes to the other side of a rounding boundary, each by 2^-3 of
    # itself: of 28 dB a fiftieth.
    assert min(sqnr(one, other) for one, other in zip(*found, strict=True)) > 40


def test_an_mlp_that_takes_a_residual_runs_its_own_forward():
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2, hidden_dropout=0.0)
    torch.manual_seed(1)
    plain = transformers.BloomForCausalLM(config).eval()
    models = [converted(copy.deepcopy(plain), "rowwise", fuse=fuse) for fuse in (False, None)]
    assert alike(LLAMA, models)
    assert producers(models[1]) == [
        f"transformer.h.0.{name}" for name in ("input_layernorm", "post_attention_layernorm", "mlp.gelu_impl")
    ]


def test_a_hook_on_the_dropout_inside_an_mlp():
    for name, kind in (("t5", "T5DenseActDense"), ("t5-v1.1", "T5DenseGatedActDense")):
        models, seen = pair(name), ([], [])
        for model, kept in zip(models, seen, strict=True):
            for module in model.modules():
                if type(module).__name__.endswith(kind):
                    module.dropout.register_full_backward_hook(lambda m, gi, go: (2 * gi[0],))
                    module.dropout.register_forward_pre_hook(lambda m, args, kept=kept: kept.append(*args))
        assert alike(FAMILIES[name], models, seen=seen)
        assert [len(kept) for kept in seen] == [2, 2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_it_goes_on(error: type[BaseException]):
    models = pair("llama")

    def fail(module, args):
        raise error

    for model in models:
        hook = block(model).mlp.register_forward_pre_hook(fail)
        with pytest.raises(error):
            model(**LLAMA.batch())
        hook.remove()
    assert alike(LLAMA, models)
