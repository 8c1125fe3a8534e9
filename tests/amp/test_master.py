"""MasterWeights: 16-bit parameters trained as FP32 ones are, with any optimizer, checkpointed and resumed bit for bit.

The reference is torch's own optimizer on FP32 weights that are given the same gradients: the masters must equal those
weights bit for bit, and the parameters their rounding.
"""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scaled_run import scaled_step
from torch import nn

from fp8engine.amp.master import MasterWeights
from fp8engine.amp.scaler import GradScaler
from fp8engine.errors import OptimizerError

LOW = [torch.float16, torch.bfloat16]
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, foreach=False),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def net(dtype: torch.dtype = torch.float16, seed: int = 0) -> Any:
    """A 16-bit MLP with an FP32 norm."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).to(dtype)
    model[1].float()
    return model


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def bits(*trees: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save([[t.detach().clone() for t in tree] for tree in trees], buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_are_what_fp32_weights_would_be(name: str, dtype: torch.dtype):
    model = net(dtype)
    twin = copy.deepcopy(model).float()
    optimizer, reference = MasterWeights(OPTIMIZERS[name](model.parameters())), OPTIMIZERS[name](twin.parameters())
    for step in range(6):
        give_gradients(model, step)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
        for p, m, q in zip(model.parameters(), optimizer.master_parameters(), twin.parameters(), strict=True):
            assert torch.equal(m, q)
            assert torch.equal(p, q.to(p.dtype))
    tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    assert {t.dtype for t in tensors} <= {torch.float32}


def test_fp32_parameters_are_their_own_masters():
    model = net()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    masters = list(optimizer.master_parameters())
    assert [m is p for m, p in zip(masters, model.parameters(), strict=True)] == [False] * 2 + [True] * 2 + [False] * 2
    assert list(optimizer.model_parameters()) == list(model.parameters())


def model_first(saved: list, other: nn.Module, resumed: MasterWeights) -> None:
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])


def optimizer_first(saved: list, other: nn.Module, resumed: MasterWeights) -> None:
    resumed.load_state_dict(saved[1])
    pairs = zip(other.parameters(), saved[0].values(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs if p.dtype in LOW), "parameters follow the masters"
    other.load_state_dict(saved[0])


@pytest.mark.parametrize("load", [model_first, optimizer_first, None])  # None: copies and pickles of both go on
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_is_exact(name: str, load: Callable | None):
    model, other = net(), net(seed=1)
    optimizer, resumed = (MasterWeights(OPTIMIZERS[name](one.parameters())) for one in (model, other))
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
    both = [(other, resumed)]
    if load is None:
        both = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    else:
        load(pickle.loads(pickle.dumps([model.state_dict(), optimizer.state_dict()])), other, resumed)
    seen = set()
    for one, stepped in ((model, optimizer), *both):
        for step in range(3, 6):
            give_gradients(one, step)
            stepped.step()
        seen.add(bits(one.parameters(), stepped.master_parameters()))
    assert len(seen) == 1


def test_states_of_other_optimizers():
    model, plain = net(), net()
    optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), lr=0.01))
    other = torch.optim.AdamW(plain.parameters(), lr=0.5)
    give_gradients(plain, 0)
    other.step()
    with pytest.warns(UserWarning, match="no FP32 masters"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert [m.dtype for m in moments] == [torch.float32] * 6
    assert torch.equal(moments[0], other.state[plain[0].weight]["exp_avg"].float())
    give_gradients(model, 1)
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())  # and an optimizer without masters takes ours
    before = bits(model.parameters(), optimizer.master_parameters())
    wrong = MasterWeights(torch.optim.AdamW(nn.Linear(3, 3).half().parameters()))
    with pytest.raises(OptimizerError, match="nothing was loaded"):
        optimizer.load_state_dict(wrong.state_dict())
    assert bits(model.parameters(), optimizer.master_parameters()) == before


def test_an_optimizer_in_use_keeps_its_state():
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    give_gradients(model, 0)
    inner.step()
    wanted = inner.state[model[0].weight]["momentum_buffer"].float()
    optimizer = MasterWeights(inner)
    kept = optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"]
    assert kept.dtype == torch.float32
    assert torch.equal(kept, wanted)


def first_master(optimizer: MasterWeights) -> torch.Tensor:
    return next(optimizer.master_parameters()).detach()


def test_parameters_written_by_others_are_followed():
    model = net()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=2.0**-14))
    give_gradients(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    kept = first_master(optimizer).clone()
    with torch.no_grad():
        model[0].weight[0] = 3.0
    assert first_master(optimizer)[0].tolist() == [3.0] * 8, "before a step, too"
    optimizer.step()
    assert first_master(optimizer)[0].tolist() == [3.0] * 8
    assert torch.equal(first_master(optimizer)[1:], kept[1:]), "bits below FP16 stay where nothing was written"
    model[0].weight.data[1] = 5.0  # torch does not count this write
    optimizer.refresh()
    optimizer.step()
    assert model[0].weight[1].tolist() == [5.0] * 8


def test_parameters_written_through_data_are_followed_where_a_state_holds_no_masters():
    model = net()
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=1.0))
    model[0].weight.data[1] = 5.0
    with pytest.warns(UserWarning, match="no FP32 masters"):
        optimizer.load_state_dict(torch.optim.SGD(net().parameters(), lr=1.0).state_dict())
    assert first_master(optimizer)[1].tolist() == [5.0] * 8


@pytest.mark.parametrize(
    ("model", "dtype", "words"),
    [
        (net(), torch.float32, r"torch.float32 .* now.*first, then wrap"),
        # the norm's weight too, whose updates would round to nothing
        (net(torch.bfloat16), torch.bfloat16, r"\(16,\) was FP32 .* torch.bfloat16 now.*first, then wrap"),
    ],
)
def test_a_model_moved_or_cast_afterwards_is_refused(model: nn.Module, dtype: torch.dtype, words: str):
    optimizer = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    model.to(dtype)
    with pytest.raises(OptimizerError, match=words):
        optimizer.step()


def test_closures_and_lbfgs():
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    wanted = data @ torch.linspace(-1, 1, 8)
    model = nn.Linear(8, 1).half()
    optimizer = MasterWeights(torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe"))

    def closure():
        optimizer.zero_grad()
        loss = (nn.functional.linear(data, model.weight.float(), model.bias.float()).squeeze() - wanted).square().mean()
        loss.backward()
        return loss

    first, *_ = [optimizer.step(closure).item() for _ in range(5)]
    # on the grid: each weight at most 1 is off by 2^-12, each input has unit variance: 8 · 2^-24, and room for its tail
    assert closure().item() < 64 * 2.0**-24 < first


def test_schedulers_groups_and_gradients():
    model = net()
    optimizer = MasterWeights(torch.optim.SGD([{"params": model[0].parameters()}], lr=0.5))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.25})
    with pytest.raises(OptimizerError, match="already"):
        optimizer.add_param_group({"params": model[2].weight})
    give_gradients(model, 0)
    before = model[2].bias.detach().clone()
    optimizer.step()
    assert not torch.equal(model[2].bias, before)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.zero_grad(set_to_none=False)
    assert [float(p.grad.abs().sum()) for p in model[0].parameters()] == [0.0, 0.0]
    optimizer.zero_grad()
    assert all(p.grad is None for p in (*model[0].parameters(), *optimizer.master_parameters()))


def half(*values: float) -> Any:
    return nn.Parameter(torch.tensor(values, dtype=torch.float16))


def test_gradients_accumulate_and_are_copied_again():
    weight = half(1.0, 1.0)
    optimizer = MasterWeights(torch.optim.SGD([weight], lr=1.0))
    for factor, zeroed, gradient in ((2, False, 2.0), (2, False, 4.0), (4, True, 4.0), (5, True, 5.0)):
        if zeroed:
            weight.grad = None
        (weight * factor).sum().backward()
        master: Any = next(optimizer.master_parameters())
        assert master.grad.tolist() == [gradient] * 2


def test_a_gradient_that_a_script_sets_is_new_at_the_old_ones_address_too():
    weight = half(0.0, 0.0)
    optimizer = MasterWeights(torch.optim.SGD([weight], lr=1.0))
    for value in (1.0, 2.0, 4.0):  # no backward pass tells of it; the new tensor has the id of the freed one
        weight.grad = None
        weight.grad = torch.full((2,), value, dtype=torch.float16)
        optimizer.step()
    assert weight.tolist() == [-7.0, -7.0]


def test_sparse_gradients():
    table: Any = nn.Embedding(6, 2, sparse=True).half()
    optimizer = MasterWeights(torch.optim.SparseAdam(table.parameters(), lr=0.5))
    before = table.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([1, 4, 4])).sum().backward()
        optimizer.step()
    assert (table.weight != before).any(1).tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("fused", [False, True])
def test_under_a_scaler_of_torch_or_ours(kind: Any, fused: bool):
    weight, scaler = half(1.0, 1.0), kind("cpu", 1024.0)
    optimizer = MasterWeights(torch.optim.SGD([weight], lr=2.0**-10, fused=fused))
    for factor in (2.0**-4, float("inf"), 2.0**-4):  # the gradient itself is above FP16's smallest only when scaled
        scaled_step(scaler, optimizer, (weight.float() * factor).sum())
    (master,) = optimizer.master_parameters()
    assert master.tolist() == [1 - 2 * 2.0**-14] * 2
    assert scaler.get_scale() == 512.0


def test_clipping_takes_the_masters():
    weight = half(1.0, 1.0, 1.0, 1.0)
    optimizer, scaler = MasterWeights(torch.optim.SGD([weight], lr=0.5)), GradScaler("cpu", 1024.0)
    scaler.scale((weight * 2).sum()).backward()
    scaler.unscale_(optimizer)
    assert nn.utils.clip_grad_norm_(optimizer.master_parameters(), 2.0).item() == 4.0
    scaler.step(optimizer)
    # clip_grad_norm_ divides by norm + 1e-6: far below half of FP16's step at 0.5
    assert weight.tolist() == [0.5] * 4


def test_skipped_steps_and_gradients_kept_zero_are_no_mistake():
    weight = half(1.0, 1.0)
    optimizer, scaler = MasterWeights(torch.optim.SGD([weight], lr=2.0**-10)), GradScaler("cpu", 16.0)
    for factor in (float("inf"), 1.0, 1.0):
        if weight.grad is not None:
            weight.grad.zero_()  # model.zero_grad(set_to_none=False), and the masters are not told
        assert optimizer.param_groups[0]["lr"] == 2.0**-10
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert weight.tolist() == [1 - 2.0**-9] * 2


def test_a_frozen_parameter_may_be_thawed():
    weight, other = half(1.0, 1.0).requires_grad_(False), half(1.0, 1.0)
    optimizer = MasterWeights(torch.optim.SGD([weight, other], lr=0.5))
    assert not weight.requires_grad
    weight.requires_grad_()
    (weight + other).sum().backward()
    optimizer.step()
    assert weight.tolist() == [0.5] * 2


def test_what_cannot_be_wrapped():
    inner, nothing = (torch.optim.SGD(net().parameters(), lr=0.1) for _ in range(2))
    optimizer, divided = MasterWeights(inner), type("DTensor", (nn.Parameter,), {})(torch.ones(1).half())
    nothing.param_groups.clear()
    for words, given in (
        ("wrapped already", optimizer),
        ("wrapped already", inner),
        (r"none of the SGD's 1 parameters is FP16 or BF16 \(float32\)", torch.optim.SGD([nn.Parameter(torch.ones(1))])),
        ("no parameters", nothing),
        ("mp_policy", torch.optim.SGD([divided])),
        ("not Sequential", net()),
    ):
        with pytest.raises(OptimizerError, match=words):
            MasterWeights(given)


def test_originals_under_names_or_of_other_shapes_are_refused():
    """Names were taken for no parameter, and the masters were the rounded weights, in silence."""
    model = net()
    originals: Any = {name: p.detach().float() for name, p in model.named_parameters()}
    shapes: Any = {p: torch.zeros(3) for p in model.parameters()}
    for words, given in (("got 0.weight", originals), (r"got a Parameter of shape \[", shapes)):
        with pytest.raises(OptimizerError, match=words):
            MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1), originals=given)
