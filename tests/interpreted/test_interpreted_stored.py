"""A result stored in FP8 by our own matmul, in the interpreter: codes, statistics, one launch."""

import pytest
import torch
from casts import bits
from chains import chain, storing
from support import sqnr, state_of

import fp8engine as fe
from fp8engine.ops import triton_backend
from fp8engine.ops.tensor import Float8Tensor


@pytest.mark.parametrize("format", [fe.E4M3, fe.E5M2], ids=str)
def test_the_kernel_stores_what_the_reference_stores(format, monkeypatch: pytest.MonkeyPatch):
    launched, real = [], triton_backend._launch
    spy = lambda first, kernel, *given: launched.append(kernel[-1]) or real(first, kernel, *given)  # noqa: E731
    monkeypatch.setattr(triton_backend, "_launch", spy)
    x, found = torch.randn(2, 19, 40), {}
    for name in ("triton", "reference"):
        torch.manual_seed(11)
        with fe.backend("reference"):
            model = chain(up=storing(format=format), warm=2)
        with fe.backend(name), torch.no_grad():
            launched.clear()
            h = model.up(4 * x)
            assert isinstance(h, Float8Tensor)
            if name == "triton":
                assert [kernel for kernel in launched if "matmul" in kernel] == ["matmul_fp8"]
        slot = fe.scaling_state(model)["up.output"]
        found[name] = h, int(slot.saturated), int(slot.nonfinite)
    (ours, over, bad), (theirs, wanted, _) = found["triton"], found["reference"]
    assert torch.equal(ours.scale, theirs.scale)
    # The reference rounds products to BF16 first (2^-8), half a step of E4M3 is 2^-4: few codes differ, by one.
    codes = [torch.from_numpy(bits(each.data)).int() for each in (ours, theirs)]
    assert (codes[0] - codes[1]).abs().max() <= 1
    assert (codes[0] != codes[1]).float().mean() < 0.1
    assert bad == 0
    assert abs(over - wanted) <= 0.2 * wanted
    assert wanted > 10


def test_amax_and_the_first_step_on_our_kernels():
    with fe.backend("triton"):
        model = chain(warm=0)
        x = torch.randn(17, 40)
        first = model.up(x)
        model.down(first).sum().backward()
        assert type(first) is torch.Tensor
        amax = fe.scaling_state(model)["up.output"].amax
        assert amax == pytest.approx(first.abs().max().item(), rel=1e-6)
        state_of(model).begin_step()
        h = model.up(x)
        assert isinstance(h, Float8Tensor)
        model.down(h).sum().backward()
        assert h.scale.item() == pytest.approx(amax.item() / 448, rel=2.0**-22)
        assert fe.inspect(model).layers[1]["input"]["ready"] == 1
    assert model.up.weight.grad is not None
    assert model.up.weight.grad.isfinite().all()


def test_gradients_of_a_chain_on_our_kernels():
    grads, x, dy = [], torch.randn(19, 40), torch.randn(19, 30)
    for name in ("triton", "reference"):
        torch.manual_seed(11)
        with fe.backend("reference"):
            model = chain()
        with fe.backend(name):
            model(x).backward(dy)
        assert fe.inspect(model).layers[1]["input"]["ready"] == 2
        grads.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        # Sums in another order and products not rounded to BF16 first move a few codes of up's gradient by a step.
        assert sqnr(theirs, ours) > 25
