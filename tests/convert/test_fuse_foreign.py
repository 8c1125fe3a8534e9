"""Fusion by default beside other people's code: what the default computes is what fuse=False computes, or it runs so.

Each test gives two copies of a model, layer by layer and by default, to the same code of a stranger.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_families import FAMILIES
from hf_fusing import groups, step
from support import converted, same, sqnr
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama

import fp8engine as fe

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def pair(name: str, before: Callable = lambda model: None, recipe: str = "rowwise", **options) -> list[Any]:
    """Copies of one model, given to `before` and converted: layer by layer, and by default."""
    models = []
    for fuse in (False, None):
        torch.manual_seed(1)
        model = FAMILIES[name].build(num_hidden_layers=1, **options)
        before(model)
        models.append(converted(model, recipe, fuse=fuse))
    return models


def alike(name: str, models: list[Any]) -> bool:
    """Whether one training step gives both the same numbers, as in test_fuse.py: but for the order of FP32 sums."""
    for _ in range(3):
        batch = FAMILIES[name].batch(rows=8)
        for model in models:
            model.zero_grad()
        if min(map(sqnr, *(step(model, batch) for model in models))) > 60:
            return True
    return False


@pytest.mark.parametrize("how", [lambda real: lambda f: f, functools.wraps], ids=["plain", "functools.wraps"])
@pytest.mark.parametrize("kind", ["LlamaRMSNorm", "LlamaMLP", "LlamaDecoderLayer", "act_fn"])
def test_a_class_whose_forward_was_replaced_after_conversion_is_asked(kind: str, how: Any, monkeypatch):
    """Libraries of faster kernels and debuggers replace forwards of classes; theirs may compute something else."""
    one, two = models = pair("llama")
    step(two, FAMILIES["llama"].batch())
    assert set(groups(two).values()) == {""}
    of: Any = type(one.model.layers[0].mlp.act_fn) if kind == "act_fn" else getattr(modeling_llama, kind)
    real = of.forward
    monkeypatch.setattr(of, "forward", how(real)(lambda self, *args, **more: 2 * real(self, *args, **more)))
    assert alike("llama", models)
    assert f"the forward of {of.__name__} is of {__name__}" in groups(two).values()


class Louder(modeling_llama.LlamaRMSNorm):
    """A subclass of a known norm that computes something else, with the same names."""

    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


def test_a_subclass_of_a_norm_is_no_norm_that_is_known():
    def put(model: Any) -> None:
        model.model.layers[0].post_attention_layernorm.__class__ = Louder

    models = pair("llama", put)
    assert alike("llama", models)
    assert [name.partition(" ")[2][:25] for name in groups(models[1])] == [
        "input_layernorm + self_at",
        "mlp.gate_proj + mlp.up_pr",  # the MLP without its norm
    ]


def test_epsilon_is_the_norms_own():
    models = pair("llama")
    for model in models:
        model.model.layers[0].input_layernorm.variance_epsilon = 1.0
    assert alike("llama", models)
    assert set(groups(models[1]).values()) == {""}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_parts_called_alone_return_tensors(error: type[BaseException]):
    models = pair("llama")
    block = models[1].model.layers[0]

    def fail(module, args):
        raise error

    hook = block.mlp.register_forward_pre_hook(fail)
    with pytest.raises(error):
        models[1](**FAMILIES["llama"].batch())
    hook.remove()
    assert type(block.input_layernorm(torch.randn(2, 3, 32))) is torch.Tensor
    assert alike("llama", models)
    assert set(groups(models[1]).values()) == {""}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_part_that_is_checkpointed_by_itself(reentrant: bool):
    """Its forward runs again in a backward pass, where it must return and save what it did before."""
    grads = []
    for model in pair("bert"):
        part = model.bert.encoder.layer[0].intermediate
        x = torch.linspace(-1, 1, 2 * 3 * 32).view(2, 3, 32).requires_grad_()
        checkpoint(part, x, use_reentrant=reentrant).sum().backward()
        grads.append(x.grad)
    assert same(grads[:1], grads[1:])


def test_a_hook_on_the_dropout_inside_an_mlp_gets_tensors():
    models, seen = pair("t5"), []
    for model in models:
        for module in model.modules():
            if type(module).__name__ == "T5DenseActDense":
                module.dropout.register_full_backward_hook(lambda m, gi, go: (2 * gi[0],))
                module.dropout.register_forward_pre_hook(lambda m, args: seen.append(type(args[0])))
    assert alike("t5", models)
    assert set(seen) == {torch.Tensor}


def test_an_accelerate_hook_that_is_removed_leaves_nothing_behind():
    hooks = pytest.importorskip("accelerate.hooks")
    models = pair("llama")
    for model in models:
        hooks.attach_align_device_hook(model, execution_device="cpu", offload=False)
    assert alike("llama", models)
    assert set(groups(models[1]).values()) == {
        f"{n}_layernorm has a forward of its own" for n in ("input", "post_attention")
    }
    for model in models:
        hooks.remove_hook_from_module(model, recurse=True)
    assert alike("llama", models)
    assert set(groups(models[1]).values()) == {""}


def test_blocks_keep_their_name_and_are_alike_and_revert():
    """accelerate, FSDP and peft look for blocks by the name of their class, and take the class of the first found."""
    plain = FAMILIES["llama"].build()
    kinds = [type(module) for module in plain.modules()]
    model: Any = converted(plain, overrides={"*.layers.1.*": "bf16"})
    first, second = map(type, model.model.layers)
    assert first is second
    assert first.__name__ == "LlamaDecoderLayer"
    assert [type(module) for module in fe.revert(model).modules()] == kinds


def test_a_norm_called_by_keyword():
    for name, place, key in (
        ("llama", "model.layers.0.input_layernorm", "hidden_states"),
        ("gpt2", "transformer.h.0.ln_1", "input"),
    ):
        one, two = pair(name)
        x = torch.randn(2, 3, 32)
        assert torch.equal(one.get_submodule(place)(**{key: x}), two.get_submodule(place)(**{key: x}))


@pytest.mark.parametrize("ran", [False, True])
def test_a_norm_that_was_replaced_is_told(ran: bool):
    models = pair("llama")
    if ran:
        step(models[1], FAMILIES["llama"].batch())
    for model in models:
        model.model.layers[0].input_layernorm = nn.Identity()
    assert alike("llama", models)
    assert list(groups(models[1]).values()) == ["its norm did not run before it", ""]


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return 2 * weight


def test_parametrized_weights():
    models = pair("llama")
    for model in models:
        for part in ("input_layernorm", "self_attn.q_proj", "mlp.down_proj"):
            parametrize.register_parametrization(model.model.layers[0].get_submodule(part), "weight", Twice())
    assert alike("llama", models)
    assert set(groups(models[1]).values()) == {""}


def test_a_copy_of_a_part_is_a_copy_of_that_part_alone():
    """As peft's modules_to_save makes, and experts made from an MLP; a norm's group knows its whole block."""
    models = pair("llama")
    for part in ("input_layernorm", "mlp", "self_attn.q_proj"):
        for model in models:
            module, memo = model.model.layers[0].get_submodule(part), {}
            twin = copy.deepcopy(module, memo)
            parameters = {id(x) for x in memo.values() if isinstance(x, nn.Parameter)}
            assert parameters == {id(p) for p in twin.parameters()}
            model.model.layers[0].set_submodule(part, twin)
    assert alike("llama", models)
