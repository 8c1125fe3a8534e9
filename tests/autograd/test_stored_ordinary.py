"""A result stored in FP8 in other people's code: whatever works on an ordinary tensor works on it, gradients too."""

import copy
import io
import operator
import pickle

import numpy as np
import pytest
import torch
from chains import chain
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8engine as fe
from fp8engine.autograd.ready import WRITTEN
from fp8engine.ops.tensor import Float8Tensor

RISING = torch.arange(50.0)


def saved(h):
    file = io.BytesIO()
    torch.save([h, h.detach()], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Cube(torch.autograd.Function):
    """A user's own Function."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 3 * x * x * dy


class Tripled(torch.autograd.Function):
    """One that writes into its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, dy):
        return 3 * dy


def leaf(h):
    d = h.detach().requires_grad_()
    (d * d).sum().backward()
    return h * d.grad


def hooked(h):
    h.register_hook(lambda dy: dy * 2)
    return h * h


READ = {
    "numpy": lambda h: h * torch.from_numpy(h.detach().cpu().numpy().copy()),
    "asarray": lambda h: h * torch.from_numpy(np.asarray(h.detach())),
    "dlpack": lambda h: h * torch.from_dlpack(h.detach()).clone(),
    "data": lambda h: h * h.data.abs().max(),
    "tolist": lambda h: h * torch.tensor(h.tolist()),
    "torch.tensor": lambda h: h * h.detach().clone().sum() + torch.tensor(h[0].tolist()),
    "float": lambda h: h * float(h.detach().sum()) + h[0, 0].item(),
    "format": lambda h: h * len(f"{h.sum():.3f}{h.detach()[0]!r}"),
    "compare": lambda h: torch.where((h == h.clone()) & (h > 0), h, -h) * torch.equal(h, h),
    "index": lambda h: h[1] + h[torch.tensor([0, 2])].sum(0) + h[h > 0].sum() + h[..., -1:] + h[None, 2, 3],
    "iterate": lambda h: sum(row for row in h) * len(h),
    "torch.save": lambda h: h * saved(h)[0].detach() + saved(h)[1],
    "pickle": lambda h: h + pickle.loads(pickle.dumps(h.detach())),
    "deepcopy": lambda h: h + copy.deepcopy(h.detach()).zero_(),
    "collate": lambda h: h * torch.utils.data.default_collate([h.detach(), h.detach()]).sum(0),
    "to": lambda h: h.to(torch.bfloat16).double() + h.to("cpu") + h.type_as(RISING),
    "views": lambda h: (h.t().reshape(5, 60).unfold(1, 2, 2) * 3).movedim(0, 1).flatten(),
    "split": lambda h: torch.cat(h.split(25, 1)[::-1], 1) * RISING,
    "as_strided": lambda h: h.as_strided((3, 5), (50, 2), 4) * 2,
    "sort": lambda h: h.sort(-1).values * RISING,
    "autograd.grad": lambda h: h * torch.autograd.grad((h * h).sum(), h, retain_graph=True)[0].detach(),
    "a leaf made of it": leaf,
    "hook": hooked,
    "Function": Cube.apply,
    "checkpoint": lambda h: checkpoint(lambda t: F.gelu(t) * t, h, use_reentrant=False),
    "attention": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None]),
    "vmap": lambda h: torch.func.vmap(lambda row: row * row)(h),
    "same memory": lambda h: h * (h.data_ptr() == h.data.data_ptr() != 0) * h.detach().share_memory_().is_shared(),
}


def items(h):
    h[1, 2] = 4.0
    h[h > 1] = 0.5
    h[torch.tensor([0, 3])] *= 2
    h[..., :3] = h[..., 3:6]


def a_view_and_its_base_in_turn(h):
    view = h[1:3]
    turned = view.t()
    h.mul_(view.sum())
    turned[0].add_(h.sum())
    h.add_(turned.sum())


def without_gradients(h):
    with torch.no_grad():
        for row in h.unbind(0):
            row.mul_(2)


def after_it_was_read_in_inference_mode(h):
    with torch.inference_mode():
        assert h.detach().view(-1).numpy().shape == (h.numel(),)
    h.mul_(2)


def dropout(h):
    torch.manual_seed(0)
    F.dropout(h, 0.5, training=True, inplace=True)


WRITTEN_BY = {
    "+=": lambda h: operator.iadd(h, 1),
    "relu": lambda h: F.relu(h, inplace=True),
    "dropout": dropout,
    "data": lambda h: h.data.mul_(2),
    "data =": lambda h: setattr(h, "data", h.data * 3),
    "detach": lambda h: h.detach().mul_(2),
    "numpy": lambda h: h.detach().numpy().__setitem__(0, 5),
    "dlpack": lambda h: torch.from_dlpack(h.detach()).mul_(2),
    "apply_": lambda h: h.detach().apply_(lambda value: 2 * value),
    "view": lambda h: h.view(-1)[3:7].mul_(3),
    "transposed": lambda h: h.t().mul_(2),
    "diagonal": lambda h: torch.diagonal(h).mul_(4),
    "unfold": lambda h: h.unfold(0, 2, 2)[0].mul_(4),
    "items": items,
    "a view and its base": a_view_and_its_base_in_turn,
    "no_grad": without_gradients,
    "inference_mode": after_it_was_read_in_inference_mode,
    "copy_": lambda h: h.copy_(h.detach() * 3),
    "zero_": lambda h: h.zero_(),
    "chain": lambda h: h.mul_(2).add_(1, alpha=2).masked_fill_(h > 2, 0.5),
    "out=": lambda h: torch.add(h.detach(), 1, out=h.detach()),
    "foreach": lambda h: torch._foreach_mul_([h], 2.0),
    "Function": Tripled.apply,
    "unsqueeze_": lambda h: h.unsqueeze_(0).squeeze_(0).mul_(2),
}


def stored_and_ordinary(model):
    """The same result twice, with a gradient to the model: stored in FP8, and as an ordinary tensor."""
    x = torch.randn(6, 20)
    h = model.up(x)
    assert isinstance(h, Float8Tensor)
    return h, model.up(x).dequantize() * 1


def assert_same_bits(found: torch.Tensor, want: torch.Tensor, weights: list[torch.Tensor]) -> None:
    """Values, and the gradients of both; the same operations on the same numbers."""
    values = found.dequantize() if isinstance(found, Float8Tensor) else found
    assert (values.dtype, values.shape) == (want.dtype, want.shape)
    assert torch.equal(values, want)
    dy = torch.randn_like(want)
    grads = [torch.autograd.grad(y, weights, dy, retain_graph=True) for y in (found, want)]
    for mine, theirs in zip(*grads, strict=True):
        assert type(mine) is torch.Tensor
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", READ)
def test_reading_gives_what_an_ordinary_tensor_gives(name: str):
    model = chain(sizes=(20, 50, 30))
    h, ordinary = stored_and_ordinary(model)
    assert_same_bits(READ[name](h), READ[name](ordinary), [model.up.weight, model.up.bias])


@pytest.mark.parametrize("name", WRITTEN_BY)
def test_what_is_written_is_seen_by_all_who_read_later(name: str):
    model = chain(sizes=(20, 50, 30))
    h, ordinary = stored_and_ordinary(model)
    for each in (h, ordinary):
        WRITTEN_BY[name](each)
    weights = [model.up.weight, model.up.bias]
    assert_same_bits(h * RISING, ordinary * RISING, weights)
    assert_same_bits(model.down(h), model.down(ordinary), [*weights, model.down.weight])
    assert fe.inspect(model).layers[1]["input"]["dequantised"] == {WRITTEN: 1}


def test_a_reader_before_the_write_keeps_what_it_read():
    model = chain(sizes=(20, 50, 30))
    x = torch.randn(6, 20)
    weights = [model.up.weight, model.down.weight]
    want = torch.autograd.grad(model.down(model.up(x)).square().sum(), weights)
    h = model.up(x)
    y = model.down(h)
    h.t_().mul_(2)
    assert h.shape == (50, 6)
    for mine, theirs in zip(torch.autograd.grad(y.square().sum(), weights), want, strict=True):
        assert torch.equal(mine, theirs)


def test_reading_alone_leaves_the_codes_to_the_next_layer():
    model = chain(sizes=(20, 50, 30))
    h = model.up(torch.randn(6, 20))
    assert len(str(h)) > 100
    assert torch.isfinite(h).all()
    assert len(h.tolist()) == len(h.detach().cpu()) == 6
    assert pickle.loads(pickle.dumps(h.detach())).sum() == h.sum()
    model.down(h.view(2, 3, 50))
    assert fe.inspect(model).layers[1]["input"]["ready"] == 2  # the second of the warm steps, and this


def test_printed_and_refused_it_is_an_ordinary_tensor():
    h = chain(sizes=(20, 50, 30)).up(torch.randn(6, 20))
    assert repr(h.detach()) == repr(h.dequantize().detach())
    assert repr(h).startswith("tensor([[")
    assert "grad_fn" in repr(h)
    with pytest.raises(RuntimeError, match="requires grad"):
        h.numpy()
    assert np.array_equal(h.numpy(force=True), h.dequantize().detach().numpy())
    with pytest.raises(fe.errors.ShapeError, match=r"\[6, 50\].*\[50, 6\]"):
        h.data = torch.ones(50, 6)


# torch 2.13's Dynamo looks at .grad of a graph's input, which is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "compiled",
    [lambda h: F.relu(h, inplace=True) * h, lambda h: h.view(-1).mul_(2).sum() * h, lambda h: h * h],
    ids=["relu", "view", "read"],
)
def test_a_compiled_function_writes_into_it(compiled, fresh):
    model = chain(sizes=(20, 50, 30))
    h, ordinary = stored_and_ordinary(model)
    want = compiled(ordinary)
    found = torch.compile(compiled, backend="aot_eager", fullgraph=True)(h)
    assert_same_bits(found, want, [model.up.weight])
    assert torch.equal(h.dequantize(), ordinary)
