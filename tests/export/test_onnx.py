"""ONNX graphs of converted models: onnxruntime computes what the engine computes, for other sizes than exported."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fp8engine as fe
from fp8engine.errors import ConversionError
from fp8engine.export.onnx_operators import floor_power_of_2
from fp8engine.numerics.recipe import resolve
from fp8engine.ops.reference.scale import floor_power_of_2 as by_bits

pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")
Dim = torch.export.Dim


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "blockwise"])
def test_onnxruntime_computes_what_the_engine_does(tmp_path, recipe: str):
    torch.manual_seed(0)
    # output=FP32: products are taken in FP32, where the emulation would round the sums to BF16 before the scales.
    layer = fe.Linear(200, 96, recipe=replace(resolve(recipe), output=fe.FP32))
    model = nn.Sequential(layer).eval()
    path = tmp_path / "model.onnx"
    fe.onnx.export(model, (torch.randn(5, 7, 200),), path, dynamic_shapes={"input": {0: Dim("b"), 1: Dim("s")}})
    x = torch.randn(3, 11, 200)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input": x.numpy()})
    with torch.no_grad():
        wanted = model(x)
        # K = 200 sums in another order, and each operand's product with its scale rounded: (K + 4) ulps of sum |x w|,
        # which the casts enlarge by at most (1 + 2^-4)^2.
        size = x.abs() @ layer.weight.abs().t() + layer.bias.abs()
    assert ((torch.from_numpy(found) - wanted).abs() <= 204 * 2.0**-24 * 1.13 * size).all()


def test_powers_of_two_are_those_of_the_bits():
    exponents = torch.arange(1, 255, dtype=torch.int32)[:, None] << 23
    mantissas = torch.cat([torch.arange(64), 2**23 - 1 - torch.arange(64), torch.randint(0, 2**23, (500,))])
    s = (exponents | mantissas.int()).view(torch.float32).reshape(-1)
    assert torch.equal(floor_power_of_2(s), by_bits(s))


def test_what_cannot_be_exported_is_refused():
    layer, x = fe.Linear(32, 16, recipe="current"), torch.ones(4, 32)
    with pytest.raises(ConversionError, match=r"call model\.eval\(\)"):
        fe.onnx.export(layer, (x,))
    with pytest.raises(ConversionError, match="use opset=21"):
        fe.onnx.export(layer.eval(), (x,), opset=19)
    with pytest.raises(ConversionError, match=r"call fe\.convert first"):
        fe.onnx.export(nn.Linear(32, 16).eval(), (x,))
