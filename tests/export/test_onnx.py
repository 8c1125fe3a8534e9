"""ONNX graphs of converted models: onnxruntime computes what the engine computes, for other sizes than exported."""

from dataclasses import replace
from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch import nn

import fp8engine as fe
from fp8engine.errors import ConversionError
from fp8engine.export.onnx_operators import floor_power_of_2
from fp8engine.nn.serving import ServedLinear
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


def run(path, **inputs: torch.Tensor) -> torch.Tensor:
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {name: x.numpy() for name, x in inputs.items()})[0])


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within the FP32 sums' order: some hundred ulps of the largest value; a wrong code is 2^-4 of one product."""
    return bool(((found - wanted).abs() <= 2.0**-15 * wanted.abs().max()).all())


@pytest.mark.parametrize("recipe", ["current", "rowwise", "blockwise"])
def test_a_served_layer(tmp_path, recipe: str):
    served = ServedLinear.of(nn.Linear(600, 300), replace(resolve(recipe), output=fe.FP32))
    model, x = nn.Sequential(served).eval(), torch.randn(6, 600)
    fe.onnx.export(model, (x,), tmp_path / "model.onnx")
    with torch.no_grad():
        assert close(run(tmp_path / "model.onnx", input=x), model(x))
    assert (tmp_path / "model.onnx").stat().st_size < 1.3 * 600 * 300, "a byte a weight, and the graph's text"


@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
def test_delayed_with_a_history_keeps_its_scale(tmp_path):
    recipe = replace(resolve("delayed"), output=fe.FP32)
    model = fe.convert(nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32)), recipe)
    x = torch.randn(6, 64)
    for _ in range(3):
        model(x).sum().backward()
    model.eval()
    with pytest.warns(UserWarning, match="2 inputs under delayed scaling keep their latest scale as a constant"):
        fe.onnx.export(model, (x,), tmp_path / "model.onnx")
    with torch.no_grad():
        assert close(run(tmp_path / "model.onnx", input=x), model(x))
        beyond = 100 * x  # the graph saturates under its constant scale
        assert run(tmp_path / "model.onnx", input=beyond).abs().max() < 0.2 * model(beyond).abs().max()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
def test_a_whole_llama_for_other_sizes(tmp_path):
    torch.manual_seed(0)
    model: Any = fe.convert(tiny.llama(), replace(resolve("rowwise"), output=fe.FP32)).eval()
    model.config.use_cache = False
    shapes = {"input_ids": {0: Dim("b"), 1: Dim("s", max=64)}}
    fe.onnx.export(model, (), tmp_path / "m.onnx", kwargs={"input_ids": tiny.tokens(2)}, dynamic_shapes=shapes)
    ids = torch.randint(3, 60, (3, 21))
    with torch.no_grad():
        assert close(run(tmp_path / "m.onnx", input_ids=ids), model(ids).logits)


@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
def test_nan_stays_visible(tmp_path):
    model, x = nn.Sequential(fe.Linear(32, 16, recipe="rowwise")).eval(), torch.randn(4, 32)
    fe.onnx.export(model, (x,), tmp_path / "model.onnx")
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    found = run(tmp_path / "model.onnx", input=x)
    assert found.isnan().any(1).tolist() == [False, True, True, False]


@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
def test_weights_that_the_graph_would_keep_in_16_bits(tmp_path):
    model: Any = fe.convert(tiny.gpt2(), "current").eval()
    model.config.use_cache = False
    with pytest.raises(ConversionError, match=r"casts a product or a transpose of its weight \(a Conv1D"):
        fe.onnx.export(model, (tiny.tokens(2),), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConversionError, match="'auto' has decided nothing yet"):
        fe.onnx.export(fe.convert(nn.Sequential(nn.Linear(32, 16)), "auto").eval(), (torch.randn(2, 32),))
