"""decorate: after one line a plain script trains in mixed precision, models stay what they were, refusals are clear.

The model that needs a scaler multiplies its output by 2^-24, in FP32: the gradients that enter FP16, (z - w)·2^-29, are
below half of its smallest number, 2^-24, and vanish; scaled, they are those of the FP32 run.
"""

import copy
import functools
import inspect
import pickle
from collections import OrderedDict, deque
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
from overflow_cases import Part
from scaled_run import decorated_step
from torch import nn
from torch.nn.utils import parametrizations

from fp8engine.amp.compare import compare
from fp8engine.amp.decorate import decorate
from fp8engine.amp.lists import OpLists
from fp8engine.amp.master import MasterWeights
from fp8engine.amp.overflow import find_overflow
from fp8engine.amp.pin import pin_fp32
from fp8engine.amp.scaler import GradScaler
from fp8engine.errors import OptimizerError


class Net(nn.Module):
    """An MLP with a norm, two blocks and an output that is a dictionary; `seen` is the dtype of what ran last."""

    def __init__(self, faint: float = 1.0):
        super().__init__()
        torch.manual_seed(0)
        self.down, self.norm = nn.Linear(8, 32), nn.LayerNorm(32)
        self.blocks: Any = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.up, self.faint = nn.Linear(32, 1), faint

    def forward(self, x: torch.Tensor, *, flag: bool = False) -> dict[str, Any]:
        h = self.norm(self.down(x))
        for block in self.blocks:
            h = h + torch.relu(block(h))
        self.seen = h.dtype
        return {"y": self.up(h).float() * self.faint, "kept": flag}


def sgd(model: Any, lr: float = 0.05) -> Any:
    return torch.optim.SGD(model.parameters(), lr=lr)


def start(level: str = "O1", faint: float = 1.0, lr: float = 0.05, **given: Any) -> tuple[Any, Any]:
    model = Net(faint)
    return decorate(model, sgd(model, lr), level=level, **given)


X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
WANTED = X[:, :1] * 0.5 - X[:, 1:2]


def loss_of(model: Any) -> torch.Tensor:
    return (model(X)["y"] - WANTED).square().mean()


def train(model: Any, optimizer: Any, steps: int = 60, faint: float = 1.0) -> list[float]:
    """A plain script, but for `optimizer.backward(loss)` where decorate has made the optimizer."""
    losses, backward = [], getattr(optimizer, "backward", torch.Tensor.backward)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(X)["y"] - WANTED * faint).square().mean() / faint
        backward(loss)
        optimizer.step()
        losses.append(loss.item() / faint)
    return losses


@functools.cache
def reference() -> list[float]:
    """Losses in FP32."""
    plain = Net()
    return train(plain, sgd(plain))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_line_trains_as_fp32_does(level: str, dtype: torch.dtype):
    model, optimizer = start(level, dtype=dtype)
    losses = train(model, optimizer)
    assert model.seen == dtype
    # Four matmuls whose operands are rounded by u, relative, and FP16's first two steps, skipped until the scale fits
    # (a step changes the loss by under 2^-11 of the first at the end): within 4 u of the first loss.
    u = 2.0**-11 if dtype == torch.float16 else 2.0**-8
    assert reference()[-1] < reference()[0] / 20
    assert abs(losses[-1] - reference()[-1]) < 4 * u * reference()[0]
    assert optimizer.scaler.is_enabled() == (dtype == torch.float16)


def test_gradients_that_underflow_train_with_the_scaler_only(level: str):
    scaled, unscaled = (
        train(*start(level, 2.0**-24, 0.05 * 2.0**24, scaler=scaler), faint=2.0**-24) for scaler in (True, False)
    )
    assert unscaled == unscaled[:1] * 60, "not one weight has moved"
    assert scaled[-1] < scaled[0] / 20
    assert abs(scaled[-1] - reference()[-1]) < 4 * 2.0**-11 * reference()[0]  # as above


def test_an_optimizer_alone():
    model = Net()
    optimizer: Any = decorate(sgd(model))
    assert torch.optim.Optimizer in type(optimizer).__mro__
    losses = []
    for _ in range(40):
        with torch.autocast("cpu", torch.float16):
            loss = (model(X)["y"].float() - WANTED).square().mean()
        decorated_step(optimizer, loss)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10
    assert optimizer.scaler.stats.iterations == 40
    assert isinstance(decorate(optimizer=sgd(Net().half())).inner, MasterWeights)


def test_models_stay_what_they_were():
    plain, model, heard = Net(), Net(), []
    model.register_forward_hook(lambda *_: heard.append(1))
    parameters, original = list(model.parameters()), model.down.weight.detach().clone()
    same, optimizer = decorate(model, sgd(model), level="O2")
    assert same is model
    assert isinstance(model, Net)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert torch.equal(optimizer.param_groups[0]["params"][0], original), "masters start from the FP32 weights"
    assert torch.equal(model.down.weight, original.half())
    output = model(X, flag=True)
    assert output["kept"] is True
    assert heard == [1]
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert not model.eval()(X)["y"].requires_grad


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_keep_the_precision_and_leave_the_scale(way):
    model, _ = start("O2")
    twin = way(model)
    assert torch.equal(twin(X)["y"], model(X)["y"])
    twin(X)["y"].sum().backward()
    assert float(twin.up.bias.grad) == 64.0, "the rows of the batch, and no scale"


@pytest.mark.parametrize(("level", "wanted"), [("O1", torch.float32), ("O2", torch.float16)])
def test_inputs_are_cast_as_the_weights_are(level: str, wanted: torch.dtype):
    fc, seen = nn.Linear(4, 4), []
    model: Any = Part(lambda x: (seen.extend(each.dtype for each in x), fc(x[0]))[1], fc=fc)
    decorate(model, level=level)
    given = torch.ones(2, 4), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)
    model(given)
    model(x=given)
    assert seen == [wanted, torch.float64, torch.int64] * 2


class OwnNorm(nn.Module):
    """A norm of no class of torch's, as those of transformers are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.weight


def test_o2_keeps_norms_and_their_arithmetic_in_fp32():
    norms = nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True), nn.RMSNorm(6), OwnNorm()
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), *norms)
    seen = []
    for module in norms:
        module.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    model, optimizer = decorate(model, sgd(model), level="O2", scaler=GradScaler("cpu", 16.0))
    running: Any = model[1].running_mean
    decorated_step(optimizer, model(torch.randn(2, 3, 8, 8)).square().mean())
    assert [module.weight.dtype for module in model] == [torch.float16] + [torch.float32] * 5
    assert seen == [torch.float16] * 5, "between the layers it is FP16"
    assert running.dtype == torch.float32
    assert running.abs().sum() > 0


BLOCKS = {"blocks.0", "blocks.1"}
EXCLUDED: dict[Any, set[str]] = {"up": {"up"}, nn.LayerNorm: set(), "blocks.*": BLOCKS, "blocks": BLOCKS}


@pytest.mark.parametrize("kind", [parametrizations.spectral_norm, parametrizations.orthogonal])
def test_o2_computes_parametrized_weights_in_fp32(kind: Any):
    plain: Any = kind(nn.Linear(4, 4)).eval()
    model = decorate(copy.deepcopy(plain), level="O2")
    assert model.parametrizations.weight.original.dtype == model.weight.dtype == torch.float16
    # Weights below 1: the parameter's rounding, 2^-12, which a norm or a rotation of 4 rows multiplies by less than 8.
    torch.testing.assert_close(model.weight.float(), plain.weight, atol=2.0**-9, rtol=0)
    assert model.train()(torch.ones(1, 4)).dtype == torch.float32


@pytest.mark.parametrize("excluded", EXCLUDED)
def test_excluded_layers_stay_in_fp32(excluded: Any, level: str):
    model: Any = Net()
    ran, layers, scaler = {}, [excluded, model.down], GradScaler("cpu", 16.0)
    model, optimizer = decorate(model, sgd(model), level=level, excluded_layers=layers, scaler=scaler)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, args, y, name=name: ran.update({name: y.dtype}))  # pyright: ignore
    decorated_step(optimizer, model(X)["y"].square().mean())
    assert {name for name, dtype in ran.items() if dtype == torch.float32} == {"down", *EXCLUDED[excluded]}
    assert model.down.weight.dtype == torch.float32


def test_tied_weights_stay_tied_and_a_kept_owner_wins():
    model = Net()
    model.blocks[1].weight = model.blocks[0].weight
    model, _ = decorate(model, sgd(model), level="O2", excluded_layers="blocks.0")
    assert model.blocks[1].weight is model.blocks[0].weight
    assert model.blocks[1].weight.dtype == torch.float32
    model(X)["y"].sum().backward()


def test_resume_of_a_decorated_run_is_exact():
    def begin() -> tuple[Any, Any]:
        model, scaler = Net(), GradScaler("cpu", 4096.0, growth_interval=3)
        return decorate(model, torch.optim.AdamW(model.parameters(), lr=0.01), level="O2", scaler=scaler)

    model, optimizer = begin()
    train(model, optimizer, 5)
    saved = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
    other, resumed = begin()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert train(model, optimizer, 5) == train(other, resumed, 5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert optimizer.scaler.state_dict() == resumed.scaler.state_dict()


def test_lists_of_models_and_optimizers_share_one_scaler():
    models = [Net(), Net()]
    scaler = GradScaler("cpu", 16.0, growth_interval=1)
    made, optimizers = decorate(models, [sgd(model) for model in models], scaler=scaler)
    assert made == models
    optimizers[1].backward((models[0](X)["y"] + models[1](X)["y"]).square().mean())
    optimizers[0].step()
    with pytest.raises(OptimizerError, match="second step"):
        optimizers[0].step()
    assert optimizers[0].scaler.get_scale() == 16.0, "the other's gradients still hold this scale"
    optimizers[1].step()
    assert optimizers[1].scaler.get_scale() == 32.0


def test_clipping_knows_the_scale():
    model, optimizer = start(scaler=GradScaler("cpu", 64.0))
    optimizer.backward(loss_of(model))
    true = torch.stack([p.grad.norm() / 64 for p in model.parameters()]).norm()
    # two sums of squares in another order, 6 parameters: a few roundings
    torch.testing.assert_close(optimizer.clip_grad_norm_(0.5), true, rtol=1e-6, atol=0)
    clipped = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    torch.testing.assert_close(clipped, torch.tensor(0.5), rtol=1e-5, atol=0)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with pytest.raises(OptimizerError, match="changed while it held the loss scale"):
        optimizer.step()


def test_a_batch_may_be_given_up_after_it_was_unscaled():
    models = [Net(), Net()]
    _, optimizers = decorate(models, [sgd(model) for model in models], scaler=GradScaler("cpu", 64.0))
    for worse in (1e38, 1.0):
        optimizers[0].backward(sum(model(X)["y"].square().mean() for model in models) * worse)
        norms = [optimizer.clip_grad_norm_(0.5) for optimizer in optimizers]
        for norm, optimizer in zip(norms, optimizers, strict=True):
            if norm.isfinite():
                optimizer.step()
            optimizer.zero_grad()
        assert optimizers[0].scaler.get_scale() == 32.0


def test_the_overflow_finder_counts_steps_without_a_scale_too():
    model, optimizer = start(dtype=torch.bfloat16)
    with find_overflow(model, optimizer) as watch:
        for worse in (1.0, 1.0, torch.inf):
            optimizer.backward(model(X * worse)["y"].square().mean())
            optimizer.step()
    assert watch.report().findings[0].step == 2


def test_changed_lists_reach_the_forward():
    model: Any = decorate(Net(), lists=OpLists(black=["layer_norm", "relu", "add"]))
    model(X)
    assert model.seen == torch.float32


Output: Any = make_dataclass("Output", ["y", "rest", "again"], frozen=True, slots=True)  # `again` may hold it itself


class Returns(nn.Module):
    """One linear layer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        self.made = Output(y, {"y": [y, 7], "text": "kept"}, [])
        self.made.again.append(self.made)
        return self.made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_dataclass_comes_back_in_fp32(level: str, dtype: torch.dtype):
    model: Any = decorate(Returns(), level=level, dtype=dtype)
    output = model(torch.ones(2, 4))
    assert output.y.dtype == output.rest["y"][0].dtype == torch.float32
    assert model.made.y.dtype == dtype
    assert (output.rest["y"][1], output.rest["text"], type(output)) == (7, "kept", Output)
    layer = compare(Returns(), torch.ones(2, 4)).layers[-1]
    assert (layer.name, layer.dtypes) == ("", ("FP16", "FP32"))
    with pin_fp32(model):
        assert model(torch.ones(2, 4)) is model.made, "nothing to cast"


@pytest.mark.parametrize(
    "kind", [dict, OrderedDict, type("Own", (dict,), {}), list, deque, tuple, type("Pair", (tuple,), {})]
)
def test_a_container_of_any_class_is_cast(kind: Any):
    class Inside(nn.Linear):
        def forward(self, given):
            (y,) = given.values() if isinstance(given, dict) else given
            seen.append(y.dtype)
            return type(given)({"y": y.half()} if isinstance(given, dict) else [y.half()])

    class Outside(nn.Sequential):
        def forward(self, x):
            y = self[0](x)
            return self[1](kind({"y": y} if issubclass(kind, dict) else [y]))

    seen: list[torch.dtype] = []
    output = decorate(Outside(nn.Linear(4, 4), Inside(4, 4)), excluded_layers="1")(torch.ones(1, 4))
    assert type(output) is kind
    assert seen == [y.dtype for y in (output.values() if isinstance(output, dict) else output)] == [torch.float32]
