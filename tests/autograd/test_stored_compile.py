"""Stored results under torch.compile: a graph stores 16 bits, reads what eager code stored, and the report says so."""

import pytest
import torch
from chains import Chain, chain, storing
from support import converted, sqnr

import fp8engine as fe
from fp8engine.ops.tensor import Float8Tensor

pytestmark = pytest.mark.usefixtures("fresh")


def test_a_compiled_model_stores_16_bits_and_says_so():
    model = converted(Chain(), overrides={"up": storing()})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(16, 40)
    for _ in range(3):
        y = compiled(x)
        y.sum().backward()
    want = x.double() @ model.up.weight.double().t() + model.up.bias.double()
    want = want @ model.down.weight.double().t() + model.down.bias.double()
    assert sqnr(want, y) > 23.5  # two casts of activations and two of weights: 31.5 - 6 dB, less 2 for small matrices
    output = fe.inspect(model).layers[0]["output"]
    assert (output["format"], output["reason"]) == ("float32", "torch.compile: a graph stores 16 bits")


# torch 2.13's Dynamo looks at .grad of a graph's input, which is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_layer_reads_what_eager_code_stored():
    model = chain()
    x = torch.randn(16, 40)
    h = model.up(x)
    assert isinstance(h, Float8Tensor)
    want = model.down(h.dequantize().detach())
    (wanted,) = torch.autograd.grad(model.down(h).square().sum(), model.up.weight)
    model.down.compile(backend="aot_eager")
    h = model.up(x)
    y = model.down(h)
    assert sqnr(want, y) > 35  # the same casts but for a scale 2^-8 apart
    (grad,) = torch.autograd.grad(y.square().sum(), model.up.weight)
    assert sqnr(wanted, grad) > 20
