"""The probe changes nothing: no module, nothing that its code counts, no state of torch; and it runs anywhere."""

import itertools
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import tiny_models
import torch
from accelerate import init_empty_weights
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from probe_modules import K, Rms, what_is
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP

from fp8engine._torch import FakeTensorMode
from fp8engine.convert import probe
from fp8engine.convert.probe import Mlp
from fp8engine.ops.reference import Norm

llama: Any = tiny_models.llama


class Counts(nn.Module):
    """Counts its calls, in an attribute or in a dict, or keeps what it saw, as `count` does."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.count = nn.Linear(8, 16), nn.Linear(16, 8), lambda *given: None
        self.calls, self.log, self.seen = 0, Counter(), []

    def forward(self, x):
        self.count(self, x)
        return self.down(F.relu(self.up(x)))


COUNTS = (
    *(lambda m, x: setattr(m, "calls", m.calls + 1), lambda m, x: m.log.update(["calls"])),
    *(lambda m, x: m.seen.append(x), lambda m, x: setattr(m, "read", x)),
)


@pytest.mark.parametrize("count", COUNTS)
def test_what_a_module_counts_and_keeps_stays_and_no_other_forward_may_stand_in_for_its_own(count: Any):
    module: Any = Counts()
    module.itself = [module]  # a cycle, which no copy follows
    assert what_is(module) == Mlp("relu", "down", "up")
    module.count = count
    assert what_is(module) is None
    assert (module.calls, module.log, module.seen, hasattr(module, "read")) == (0, Counter(), [], False)


def test_neither_hooks_nor_graphs_nor_accelerates_wrappers_run():
    """A class swap puts its forward under accelerate's (tests/convert/test_convert_dispatched.py)."""
    model, ran = llama(), []
    note = lambda *args: ran.append(args)  # noqa: E731 - several uses
    for module in model.modules():
        module.register_forward_pre_hook(note)
        module.register_forward_hook(note)
    model.model.layers[0].mlp._compiled_call_impl = note
    hook = AlignDevicesHook(execution_device="cpu")
    hook.pre_forward = lambda module, *args, **kwargs: (ran.append(module), (args, kwargs))[1]
    add_hook_to_module(model, hook, append=True)
    for module in (model.model.norm, model.model.layers[1].mlp, model.model.layers[1].mlp.act_fn):
        add_hook_to_module(module, hook)
    with nn.modules.module.register_module_forward_hook(note):
        found = probe.survey(model)
    assert ran == []
    assert found == probe.survey(llama())


def test_the_state_of_torch_and_of_the_model_stays():
    torch.manual_seed(5)
    random.seed(5)
    model = llama(attention_dropout=0.5)
    model.append = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8))

    def state() -> tuple:
        parameters = [(id(p), p._version, p.requires_grad, p.grad) for p in model.parameters()]
        modes = [module.training for module in model.modules()]
        random_numbers = torch.get_rng_state().tolist(), random.getstate()
        return parameters, modes, random_numbers, torch.is_grad_enabled(), torch.get_default_dtype()

    before = state()
    probe.survey(model)
    assert state() == before


CONTEXTS = {
    "meta": lambda: torch.device("meta"),
    "accelerate": lambda: init_empty_weights(include_buffers=True),
    "fake": FakeTensorMode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "nothing": nullcontext,
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_in_any_context_a_model_is_what_it_is(name: str, where: str):
    with torch.device(where):
        model = llama()
    expected = probe.survey(llama())
    with CONTEXTS[name]():
        assert probe.survey(model) == expected
        assert all(value.device.type == where for value in model.parameters())
    assert set(map(type, expected.values())) == {Norm, Mlp}


def test_autocast_does_not_reach_a_twin():
    """It would make a product of FP32 in BF16."""

    def formula(rms: Any, x: torch.Tensor) -> torch.Tensor:
        mean = x.float().square() @ torch.full((K, 1), 1 / K, dtype=torch.float32, device=x.device)
        return rms.weight * (x.float() * torch.rsqrt(mean + rms.eps)).to(x.dtype)

    with torch.autocast("cpu", torch.bfloat16):
        assert what_is(Rms(formula=formula)) == Norm("rms", 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_of_parameters_and_the_default(dtype: torch.dtype):
    expected = probe.survey(llama())
    torch.set_default_dtype(dtype)
    try:
        assert probe.survey(llama()) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_module_whose_attributes_are_no_plain_values():
    class Odd(Counts):
        config: Any
        function: Any
        hold: Any

        def forward(self, x):
            return self.down(self.function(self.up(x))) * self.config.scale

    class Config:
        def __init__(self, scale: float):
            self.scale, self.inner = scale, [{"a": (1, 2)}]

    def made(scale: float, function=F.silu) -> Any:
        module = Odd()
        module.config, module.function, module.hold = Config(scale), function, [torch.ones(1)]
        return module

    assert what_is(made(1.0)) == Mlp("silu", "down", "up")
    assert what_is(made(2.0)) is None
    assert what_is(made(1.0, nn.PReLU().forward)) is None, "of a module with parameters that is in no child"
    # Modules of one class are told apart by their attributes, whatever those are.
    found = probe.survey(nn.ModuleList([made(1.0), made(2.0), made(1.0, F.gelu), made(1.0)]))
    kinds = {key: what.kind for key, what in found.items() if isinstance(what, Mlp)}
    assert kinds == {"0": "silu", "2": "gelu", "3": "silu"}


def test_several_threads_may_ask():
    model, expected = llama(), probe.survey(llama())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: probe.survey(model), range(4)))
    assert found == [expected] * 4


def test_alike_modules_run_once(monkeypatch):
    ran = itertools.count()
    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: (next(ran), plain(self, x))[1])
    with torch.device("meta"):
        wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
        model = llama(num_hidden_layers=80, **wide)
    begin = time.perf_counter()
    found = probe.survey(model)
    assert time.perf_counter() - begin < 5, "about 0.1 s; a copy of one weight takes longer than that"
    assert Counter(map(type, found.values())) == {Mlp: 80, Norm: 80 * 2 + 1}
    assert next(ran) <= 2 * len(probe.MODES)


def test_errors_of_a_modules_own_code_do_not_escape():
    class Loud(nn.Module):
        @property
        def base_layer(self):
            raise RuntimeError("not now")

        def forward(self, x):
            raise SystemError("never")

    assert probe.survey(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": Loud()})) == {}
