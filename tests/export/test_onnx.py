"""ONNX graphs of converted models: onnxruntime computes what the engine computes, for other sizes than exported."""

from dataclasses import replace
from typing import Any, cast

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


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "blockwise", "mxfp8"])
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
    with pytest.raises(ConversionError, match=r"takes an nn\.Module, not NoneType"):
        fe.onnx.export(cast("nn.Module", None), (x,))
    with pytest.raises(ConversionError, match="'auto' has decided nothing yet"):
        fe.onnx.export(fe.convert(nn.Sequential(nn.Linear(32, 16)), "auto").eval(), (x,))


def run(path, **inputs: torch.Tensor) -> torch.Tensor:
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {name: x.numpy() for name, x in inputs.items()})[0])


def agrees(path, model: Any, **inputs: torch.Tensor) -> bool:
    """Within the FP32 sums' order: some hundred ulps of the largest value; a wrong code is 2^-4 of one product."""
    with torch.no_grad():
        wanted = model(*inputs.values())
    wanted = wanted if isinstance(wanted, torch.Tensor) else wanted[0]
    return bool(((run(path, **inputs) - wanted).abs() <= 2.0**-15 * wanted.abs().max()).all())


@pytest.mark.parametrize("recipe", ["current", "rowwise", "blockwise", "mxfp8"])
def test_a_served_layer(tmp_path, recipe: str):
    served = ServedLinear.of(nn.Linear(600, 300), replace(resolve(recipe), output=fe.FP32))
    model, x = nn.Sequential(served).eval(), torch.randn(6, 600)
    fe.onnx.export(model, (x,), tmp_path / "model.onnx")
    assert agrees(tmp_path / "model.onnx", model, input=x)
    # A byte a weight and the graph's text; MX scales, of 32 weights each, take four bytes here.
    assert (tmp_path / "model.onnx").stat().st_size < 1.4 * 600 * 300


def test_delayed_with_a_history_keeps_its_scale(tmp_path):
    recipe = replace(resolve("delayed"), output=fe.FP32)
    model = fe.convert(nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32)), recipe)
    x = torch.randn(6, 64)
    for _ in range(3):
        model(x).sum().backward()
    model.eval()
    with pytest.warns(UserWarning, match="2 inputs under delayed scaling keep their latest scale as a constant"):
        fe.onnx.export(model, (x,), tmp_path / "model.onnx")
    assert agrees(tmp_path / "model.onnx", model, input=x)
    with torch.no_grad():
        beyond = 100 * x  # the graph saturates under its constant scale
        assert run(tmp_path / "model.onnx", input=beyond).abs().max() < 0.2 * model(beyond).abs().max()


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("make", "fuse"), [(tiny.llama, True), (tiny.bert, False)])
def test_whole_models_for_other_sizes(tmp_path, make, fuse: bool):
    torch.manual_seed(0)
    model: Any = fe.convert(make(), replace(resolve("rowwise"), output=fe.FP32), fuse=fuse).eval()
    shapes = {"input_ids": {0: Dim("b"), 1: Dim("s", max=32)}}
    model.config.use_cache = True  # transformers' default; the graph has no cache
    fe.onnx.export(model, (), tmp_path / "m.onnx", kwargs={"input_ids": tiny.tokens(2)}, dynamic_shapes=shapes)
    assert model.config.use_cache
    ids = torch.randint(3, 60, (3, 21))
    assert agrees(tmp_path / "m.onnx", model, input_ids=ids)


@pytest.mark.short
@pytest.mark.slow
@pytest.mark.parametrize("module", [fe.LayerNormMLP, fe.LayerNormLinear])
def test_layers_with_norm_and_activation(tmp_path, module):
    torch.manual_seed(0)
    model, x = module(64, 96, recipe=replace(resolve("rowwise"), output=fe.FP32)).eval(), 3 * torch.randn(6, 64) + 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # weights and biases of norms are 1 and 0 otherwise
    fe.onnx.export(model, (x,), tmp_path / "model.onnx")
    assert agrees(tmp_path / "model.onnx", model, x=x)


@pytest.mark.slow
def test_16_bits(tmp_path):
    """FP16 runs; BF16 is refused, and the same codes run in FP32."""
    torch.manual_seed(0)
    layers, x = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)), torch.randn(6, 64)
    half = fe.convert(layers.half(), "rowwise").eval()
    fe.onnx.export(half, (x.half(),), tmp_path / "half.onnx")
    with torch.no_grad():
        wanted = half(x.half()).float()
    found = run(tmp_path / "half.onnx", input=x.half())
    assert found.dtype == torch.float16
    assert (found.float() - wanted).norm() < 2.0**-6 * wanted.norm(), "sums are rounded to BF16 here"
    layer = ServedLinear.of(nn.Linear(64, 32).bfloat16(), replace(resolve("rowwise"), output=fe.FP32))
    served = nn.Sequential(layer)
    with pytest.raises(ConversionError, match=r"0\.bias is in BF16, .* call model\.float\(\)"):
        fe.onnx.export(served.eval(), (x.bfloat16(),), tmp_path / "bf16.onnx")
    codes = layer.weight.clone()
    fe.onnx.export(served.float(), (x,), tmp_path / "served.onnx")
    assert agrees(tmp_path / "served.onnx", served, input=x)
    assert torch.equal(layer.weight.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.slow
def test_a_loaded_checkpoint_in_bf16_is_refused_with_a_way_that_goes(tmp_path):
    """transformers lets nobody cast a model that it has loaded as quantised."""
    fe.hf.export(tiny.llama().bfloat16(), tmp_path / "out", "rowwise")
    model: Any = fe.hf.load(tmp_path / "out", dtype=torch.bfloat16).eval()
    with pytest.raises(ConversionError, match=r"or load it by fe\.hf\.load\(\.\.\., dtype=torch\.float32\)"):
        fe.onnx.export(model, (tiny.tokens(),), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="not supported for quantized"):
        model.float()
    loaded = fe.hf.load(tmp_path / "out", dtype=torch.float32).eval()
    fe.onnx.export(loaded, (tiny.tokens(),), tmp_path / "model.onnx")


def test_auto_as_it_has_decided(tmp_path):
    """A row 10^4 times as large makes the first input per row: per tensor the others would be flushed to zero."""
    torch.manual_seed(0)
    model = fe.convert(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)), "auto")
    x = torch.randn(64, 64)
    x[5] *= 1e4
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
    assert fe.inspect(model).layers[0]["input"]["cast"] == "E4M3 per row"
    fe.onnx.export(model.eval(), (x,), tmp_path / "model.onnx")
    with torch.no_grad():
        apart = (run(tmp_path / "model.onnx", input=x) - model(x)).norm(dim=1) / model(x).norm(dim=1)
    assert apart.max() < 2.0**-7, "sums are rounded to BF16 here"


def test_an_error_leaves_the_old_file(tmp_path, monkeypatch: pytest.MonkeyPatch):
    layer, x, path = fe.Linear(32, 16, recipe="current").eval(), torch.ones(4, 32), tmp_path / "model.onnx"
    fe.onnx.export(layer, (x,), path)
    old = path.read_bytes()

    def cut_off(self: object, destination: Any) -> None:
        destination.write_bytes(b"half a graph")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch.onnx.ONNXProgram, "save", cut_off)
    with pytest.raises(OSError, match="No space"):
        fe.onnx.export(layer, (x,), path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_nan_stays_visible(tmp_path):
    model, x = nn.Sequential(fe.Linear(32, 16, recipe="rowwise")).eval(), torch.randn(4, 32)
    fe.onnx.export(model, (x,), tmp_path / "model.onnx")
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    found = run(tmp_path / "model.onnx", input=x)
    assert found.isnan().any(1).tolist() == [False, True, True, False]


@pytest.mark.slow
def test_gpt2s_weights_are_stored_transposed_and_cast_once(tmp_path):
    torch.manual_seed(0)
    model: Any = fe.convert(tiny.gpt2(), replace(resolve("rowwise"), output=fe.FP32)).eval()
    program = fe.onnx.export(model, (tiny.tokens(2),), tmp_path / "m.onnx")
    codes = [each for each in program.model.graph.initializers if each.endswith("weight_codes")]
    assert len(codes) == 4 * len(model.transformer.h)
    assert not {each.removesuffix("_codes") for each in codes} & set(program.model.graph.initializers)
    ids = tiny.tokens(2).flip(0)
    assert agrees(tmp_path / "m.onnx", model, input_ids=ids)


@pytest.mark.slow
def test_weights_that_the_graph_would_keep_in_16_bits(tmp_path):
    model: Any = fe.convert(tiny.llama(), "current", fuse=False).eval()
    fe.smooth(model)
    model.config.use_cache = True  # transformers' default; a cache is no tensor
    with pytest.raises(ConversionError, match=r"layers.0.mlp.down_proj multiplies by a weight that its input changes"):
        fe.onnx.export(model, (tiny.tokens(2),), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []
    assert model.config.use_cache


@pytest.mark.slow
def test_what_torchs_exporter_does_not_know_is_named(tmp_path):
    """Experts: the plain model is not exported either."""
    model: Any = fe.convert(tiny.mixtral(), "rowwise").eval()
    with pytest.raises(ConversionError, match=r"torch's exporter cannot translate this model.*aten\.sort"):
        fe.onnx.export(model, (tiny.tokens(2),), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


class Positions(nn.Module):
    """Scores of an input against projected positions, which no input reaches (DeBERTa)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 32))
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x) @ self.key(self.table.tanh()).t()


@pytest.mark.slow
def test_a_layer_that_reads_parameters_alone(tmp_path):
    """Its input's cast is that of a constant, and none of its weight."""
    torch.manual_seed(0)
    model, x = fe.convert(Positions(), replace(resolve("rowwise"), output=fe.FP32)).eval(), torch.randn(4, 32)
    fe.onnx.export(model, (x,), tmp_path / "model.onnx")
    assert agrees(tmp_path / "model.onnx", model, x=x)
