"""Producers whose module is not what it was when fe.convert recognised it: what is there now is what computes.

As in test_fuse.py two copies, with fuse=False and by default, are changed alike and compute the same.
"""

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_families import FAMILIES
from hf_fusing import alike, block, pair, producers, sources, step
from probe_modules import Function, Gated, Rms, TimmGluMlp, by_hand
from support import converted, same, sqnr
from torch import nn
from torch.nn.utils import parametrize
from transformers.models.llama import modeling_llama

from fp8engine.convert.twin import own_attributes
from fp8engine.nn import produce

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
LLAMA = FAMILIES["llama"]


def _named(kind: Any, forward: Any) -> Any:
    return functools.wraps(kind.forward)(forward)


@pytest.mark.parametrize("kind", ["LlamaRMSNorm", "LlamaMLP", "LlamaDecoderLayer", "ReLU"])
@pytest.mark.parametrize("how", [lambda kind, f: f, _named], ids=["plain", "functools.wraps"])
def test_a_class_whose_forward_was_replaced_after_conversion_is_asked(kind: str, how: Any, monkeypatch):
    """Libraries of faster kernels and debuggers replace forwards of classes; theirs may compute something else."""
    name = "opt" if kind == "ReLU" else "llama"
    of: Any = getattr(nn if kind == "ReLU" else modeling_llama, kind)
    models, real, batch = pair(name), of.forward, FAMILIES[name].batch()
    plain = step(models[1], batch)
    monkeypatch.setattr(of, "forward", how(of, lambda self, *args, **more: 2 * real(self, *args, **more)))
    assert alike(FAMILIES[name], models)
    models[1].zero_grad()
    assert not same(step(models[1], batch)[:1], plain[:1])
    monkeypatch.undo()
    models[1].zero_grad()
    assert same(step(models[1], batch), plain)


def _norms(part: Any) -> None:
    part.input_layernorm = nn.Identity()
    part.post_attention_layernorm.variance_epsilon = 1.0


def _function(part: Any) -> None:
    del part.mlp.act_fn
    part.mlp.act_fn = torch.tanh


def _parametrized(part: Any) -> None:
    for name in ("input_layernorm", "self_attn.q_proj", "mlp.down_proj"):
        parametrize.register_parametrization(part.get_submodule(name), "weight", Function(lambda weight: 2 * weight))


def _copied(part: Any) -> None:
    """As peft's modules_to_save makes, and experts made from an MLP: of that part alone."""
    for name in ("input_layernorm", "mlp", "self_attn.q_proj"):
        module, memo = part.get_submodule(name), {}
        twin = copy.deepcopy(module, memo)
        parameters = {id(x) for x in memo.values() if isinstance(x, nn.Parameter)}
        assert parameters == {id(p) for p in twin.parameters()}
        part.set_submodule(name, twin)


def _wrapped(part: Any) -> None:
    """As accelerate puts its hooks: the module's forward is wrapped, and stays the one that runs."""
    for name in ("input_layernorm", "mlp", "self_attn.v_proj"):
        module = part.get_submodule(name)
        module.forward = lambda *x, inner=module.forward, **more: 2 * inner(*x, **more)


# What is done to a block -> who then makes what the layers read, "" for nobody.
DONE: dict[str, tuple[Callable[[Any], Any], dict[str, str]]] = {
    "another activation": (lambda part: setattr(part.mlp, "act_fn", nn.Tanh()), {"mlp.down_proj": ""}),
    "a function in its place": (_function, {"mlp.down_proj": ""}),
    "the activation's forward": (lambda part: setattr(part.mlp.act_fn, "forward", torch.tanh), {"mlp.down_proj": ""}),
    "a norm, and another's eps": (_norms, {"self_attn.k_proj": "", "mlp.up_proj": "post_attention_layernorm"}),
    "parametrized weights": (_parametrized, {"self_attn.q_proj": "input_layernorm"}),
    "forwards of instances": (_wrapped, {"self_attn.q_proj": "", "mlp.down_proj": "mlp"}),
    "copies of parts": (_copied, {"self_attn.q_proj": "input_layernorm", "mlp.down_proj": "mlp"}),
}


@pytest.mark.parametrize("done", DONE)
@pytest.mark.parametrize("ran", [False, True])
def test_what_is_done_to_a_block_after_conversion_is_followed(done: str, ran: bool):
    models, (change, wanted) = pair("llama"), DONE[done]
    for model in models:
        if ran:
            step(model, LLAMA.batch())
        change(block(model))
    assert alike(LLAMA, models)
    found = sources(models[1])
    assert {layer: found[f"model.layers.0.{layer}"] for layer in wanted} == wanted


class Settable(nn.Module):
    """A norm, an activation and a gated MLP that look at attributes."""

    def __init__(self):
        super().__init__()
        self.norm: Any = Rms(formula=lambda norm, x: by_hand(norm, x) * norm.scale)
        self.norm.scale = 1
        self.act, self.mlp = SettableSwish(), SettableMlp()
        self.inner, self.proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.gelu, self.out = nn.GELU(), nn.Linear(32, 32)

    def forward(self, x):
        x = x + self.mlp(self.norm(x))
        return self.out(self.gelu(self.proj(self.act(self.inner(x)))))


class SettableSwish(nn.Module):
    """Has its class's beta."""

    beta = 1.0

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


class SettableMlp(nn.Module):
    """Has dropout and an activation by function, and may have a scale."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.p, self.fn = 0.0, nn.functional.silu

    def forward(self, x):
        h = self.fn(self.gate(x)) * self.up(x) * getattr(self, "scale", 1.0)
        return self.down(nn.functional.dropout(h, self.p) if self.p else h)


SETTINGS: dict[str, Callable[[Any], Any]] = {
    "a scale": lambda model: setattr(model.norm, "scale", 4),
    "another scale, in place of 1": lambda model: setattr(model.norm, "scale", torch.tensor(2.0)),
    "beta": lambda model: setattr(model.act, "beta", 3),
    "dropout": lambda model: setattr(model.mlp, "p", 0.5),
    "a function": lambda model: setattr(model.mlp, "fn", nn.functional.relu),
    "an attribute that was not there": lambda model: setattr(model.mlp, "scale", 3.0),
}


def settable() -> list[Any]:
    plain = Settable()
    models = [converted(copy.deepcopy(plain), "rowwise", fuse=fuse) for fuse in (False, None)]
    assert producers(models[1]) == ["norm", "act", "mlp", "gelu"]
    return models


def ran(model: Any, call: Any = None) -> list[torch.Tensor]:
    """A step's result and gradients, dropout drawn from one seed.  call: the model, or what compiles it."""
    model.zero_grad()
    torch.manual_seed(3)
    y = (model if call is None else call)(torch.linspace(-2, 3, 24 * 32).view(24, 32))
    y.square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


COMPILED = ["a function", "an attribute that was not there"]


@pytest.mark.parametrize(
    ("setting", "compiled"), [*((setting, False) for setting in SETTINGS), *((setting, True) for setting in COMPILED)]
)
def test_an_attribute_that_is_set_after_conversion_is_followed(setting: str, compiled: bool, fresh):
    models = settable()
    call = None
    if compiled:  # what is set is the MLP's
        models = [model.mlp for model in models]
        call = torch.compile(models[1], fullgraph=True, backend="aot_eager")
    before = ran(models[1], call)
    for model in models:
        SETTINGS[setting](SimpleNamespace(mlp=model) if compiled else model)
    found = [ran(models[0]), ran(models[1], call)]
    assert min(map(sqnr, *found)) > 40
    assert sqnr(found[1][0], before[0]) < 30, "it makes another model"


class Unchanged(nn.Module):
    """Whether its attributes are what they were, as code that a graph can hold."""

    def __init__(self):
        super().__init__()
        self.shape, self.p, self.name, self.config, self.none = (32,), 0.5, "tanh", SimpleNamespace(), None
        self.act, self.silu = functools.partial(nn.functional.gelu, approximate="tanh"), nn.functional.silu
        self.known = tuple(own_attributes(self))

    def forward(self, x):
        return x + 1 if produce._unchanged(self, self.known) else x - 1


def test_in_a_graph_too_attributes_are_what_they_were(fresh):
    """torch.compile has other objects for a tuple and for a partial function."""
    module = Unchanged()
    assert len(module.known) == 7
    call = torch.compile(module, fullgraph=True, backend="eager")
    assert module(torch.zeros(1)) == call(torch.zeros(1)) == 1
    module.act = functools.partial(nn.functional.gelu, approximate="none")
    assert module(torch.zeros(1)) == call(torch.zeros(1)) == -1


def test_a_class_whose_attribute_is_set_after_conversion_is_followed(monkeypatch: pytest.MonkeyPatch):
    models = settable()
    monkeypatch.setattr(SettableSwish, "beta", 3.0)
    assert min(map(sqnr, *map(ran, models))) > 40
    assert type(models[1].act(torch.ones(2, 32)).grad_fn) is type(models[0].act(torch.ones(2, 32)).grad_fn)


def test_another_form_of_gelu_is_followed_by_itself_and_as_a_part_of_an_mlp(monkeypatch: pytest.MonkeyPatch):
    gelu, x = settable()[1].gelu, torch.linspace(-4, 4, 64).view(2, 32)
    mlp = converted(TimmGluMlp(nn.GELU), "rowwise")
    assert producers(mlp) == [""]
    before, calls, forward = gelu(x), [], nn.GELU.forward
    with monkeypatch.context() as patch:
        patch.setattr(nn.GELU, "forward", lambda self, x: (calls.append(x), forward(self, x))[1])
        mlp(x)
        assert calls == []
        gelu.approximate = mlp.act.approximate = "tanh"
        mlp(x)
    assert len(calls) == 1, "the MLP's own forward"
    assert not torch.equal(gelu(x), before)
    assert torch.equal(gelu(x), nn.functional.gelu(x, approximate="tanh"))


class Listed(nn.Module):
    """Runs what is in a list."""

    def __init__(self, *parts: nn.Module):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def _parts(model: Any) -> Any:
    return getattr(model, "parts", model)


# What is done to a container that fe.convert has recognised as an MLP -> what is called then.
CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "append": lambda model: (_parts(model).append(nn.Softmax(-1)), model)[1],
    "extend": lambda model: (_parts(model).extend([nn.Tanh(), nn.Softmax(-1)]), model)[1],
    "insert": lambda model: (_parts(model).insert(1, nn.Softmax(-1)), model)[1],
    "pop and append": lambda model: (_parts(model).pop(1), _parts(model).append(nn.Softmax(-1)), model)[2],
}
SLICES: dict[str, Callable[[Any], Any]] = {
    "the first two": lambda model: model[:2],
    "the last two": lambda model: model[1:],
    "all, and one more": lambda model: model[:].append(nn.Softmax(-1)),
}


@pytest.mark.parametrize(
    ("of", "done"), [*((Listed, key) for key in CONTAINERS), *((nn.Sequential, key) for key in CONTAINERS | SLICES)]
)
def test_what_a_container_holds_after_conversion_is_what_runs(of: Any, done: str):
    plain, x, found = of(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 32)), torch.randn(8, 32), []
    for fuse in (False, None):
        model = converted(copy.deepcopy(plain), "rowwise", fuse=fuse)
        before = model(x)
        found.append((CONTAINERS | SLICES)[done](model)(x.clone()))
    assert producers(model) == [""]
    assert torch.equal(*found)
    assert not torch.equal(found[0], before)


class CastsInput(Gated):
    """An MLP of a model whose residual stream is in FP32."""

    def forward(self, x):
        return super().forward(x.to(self.w1.weight.dtype))


def test_an_mlp_that_casts_what_it_reads_to_its_weights_dtype_does_so():
    plain, x = CastsInput().bfloat16(), torch.randn(8, 32)
    unfused, fused = (converted(copy.deepcopy(plain), "rowwise", fuse=fuse) for fuse in (False, None))
    assert producers(fused) == [""]
    assert fused(x).dtype == torch.bfloat16
    assert torch.equal(fused(x), unfused(x)), "its own forward"


@pytest.mark.parametrize("kind", [nn.LayerNorm, lambda width: nn.RMSNorm(width, 1e-6)])
def test_a_number_without_dimensions_is_refused_as_torch_refuses_it(kind: Callable):
    plain = nn.Sequential(kind(32), nn.Linear(32, 32))
    model = converted(copy.deepcopy(plain))
    assert producers(model) == ["0"]
    told = []
    for norm in (plain[0], model[0]):
        with pytest.raises((RuntimeError, ValueError)) as error:
            norm(torch.tensor(1.0))
        told.append(str(error.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("name", ["t5", "t5-v1.1"])
@pytest.mark.parametrize("when", ["from the beginning", "after conversion"])
def test_dropout_between_activation_and_down(name: str, when: str):
    models = pair(name, **({"dropout_rate": 0.1} if when == "from the beginning" else {}))
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        model.train()
    assert alike(FAMILIES[name], models)


def test_t5_casts_to_the_dtype_of_a_weight_that_stays_in_fp32():
    found, batch = [], FAMILIES["t5-v1.1"].batch()
    for model in pair("t5-v1.1"):
        half = model.bfloat16()
        for module in half.modules():
            if hasattr(module, "wo"):
                module.wo.float()
        found.append(step(half, batch))
    # At worst every code differs that may: FP8's noise in ten layers forward and backward, as hf_fusing.py derives it,
    # 13 dB, and 3 for chance.  In truth few do, where BF16 rounds a sum in another order.
    assert min(map(sqnr, *found)) > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_under_autocast_every_module_returns_the_dtype_that_it_did(name: str, dtype: torch.dtype):
    """On a card autocast gives a LayerNorm's result in FP32, so that under it the own forward of one in BF16 runs."""
    found = []
    for model in pair(name, **({"num_labels": 16} if name == "bert" else {})):
        dtypes: dict[str, torch.dtype] = {}
        for key, module in model.to(dtype).named_modules():
            note = lambda m, args, y, key=key, seen=dtypes: seen.update({key: getattr(y, "dtype", None)})  # noqa: E731
            module.register_forward_hook(note)
        with torch.autocast("cpu", torch.bfloat16):
            step(model, FAMILIES[name].batch())
        found.append(dtypes)
    codes = {by.rpartition(".")[2] for by in sources(model).values() if "norm" in by.lower() or "ln" in by}
    assert bool(codes) is (name == "llama" or dtype == torch.float32)
    acts = {key for key in found[0] if "act" in key.rpartition(".")[2]}  # of a gated MLP it does not run
    assert {key: kind for key, kind in found[0].items() if key not in acts - found[1].keys()} == found[1]


def test_a_norm_called_by_keyword():
    for name, place, key in (
        ("llama", "model.layers.0.input_layernorm", "hidden_states"),
        ("gpt2", "transformer.h.0.ln_1", "input"),
    ):
        one, two = pair(name)
        x = torch.randn(2, 3, 32)
        assert torch.equal(one.get_submodule(place)(**{key: x}), two.get_submodule(place)(**{key: x}))
