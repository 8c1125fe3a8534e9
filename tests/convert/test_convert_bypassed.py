"""Converted layers whose weight is read without a call: torch's fast paths are kept from it, others are warned of."""

import copy
import threading
import warnings
from typing import Any

import pytest
import torch
from reading_models import Asks, Eva, Model, kernel
from support import converted, pickled
from torch import nn
from torch._dynamo.testing import CompileCounter

import fp8engine as fe
from fp8engine.convert.bypassed import FirstForward

# torch says so of every encoder that cannot take its nested tensors, converted or not.
pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
SIZE = {"d_model": 32, "nhead": 2, "dim_feedforward": 64, "dropout": 0.0, "batch_first": True}


class Classifier(nn.Module):
    """A root that holds torch's encoder."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**SIZE, **options), 2)
        self.out = nn.Linear(32, 4)

    def forward(self, x, mask=None):
        return self.out(self.encoder(x, src_key_padding_mask=mask))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """x and the mask of its padding; the rows that are padding are at the end, as torch's nested tensors want them."""
    torch.manual_seed(3)
    return torch.randn(4, 6, 32), torch.arange(6) >= torch.tensor([6, 4, 5, 6])[:, None]


def eager(model: Classifier, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """What the model computes layer by layer, each called as a layer; post-norm."""
    for layer in model.encoder.layers:
        part: Any = layer
        attended, _ = part.self_attn(x, x, x, key_padding_mask=mask, need_weights=False)
        x = part.norm1(x + attended)
        x = part.norm2(x + part.linear2(part.activation(part.linear1(x))))
    return model.out(x)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_encoder_evaluates_by_its_converted_layers(mode, masked: bool):
    plain = Classifier().eval()
    model = converted(copy.deepcopy(plain))
    x, padding = inputs()
    mask = padding if masked else None
    with mode():
        found, want, full = model(x, mask), eager(model, x, mask), plain(x, mask)
    used = (~padding if masked else torch.ones_like(padding))[..., None]
    # Attention itself is torch's, by its fast path or not: FP32 sums in another order, 1e-6, and an FP8 cast of what
    # they make may round to the neighbour: far below the noise of FP8 itself, which is what must be seen at all.
    noise = ((want - full) * used).norm()
    assert ((found - want) * used).norm() < 0.2 * noise
    assert noise > 0.005 * (full * used).norm(), "FP8 ran"
    report = fe.inspect(model)
    rows = {row["name"].removeprefix("encoder.layers.0."): row for row in report.layers}
    assert report.totals["never_ran"] == 0
    assert rows["self_attn.out_proj"]["reason"] == "MultiheadAttention reads its weight and never calls it"
    assert rows["self_attn.in_proj_weight"]["shape"] == [96, 32]
    assert "multiplies by this weight itself" in rows["self_attn.in_proj_weight"]["reason"]
    # A block's weights: 3 x 32 x 32 and 32 x 32 in attention, twice 64 x 32 in FP8; then 4 x 32, in FP8 too.
    fp8, others = 2 * 2 * 64 * 32 + 4 * 32, 2 * 4 * 32 * 32
    assert report.totals["fp8_flops_share"] == pytest.approx(fp8 / (fp8 + others))


def test_copies_and_saved_encoders_evaluate_in_fp8_and_keep_what_torch_says_of_them():
    model, (x, mask) = converted(Classifier()).eval(), inputs()
    with torch.no_grad():
        for each in (copy.deepcopy(model), pickled(model)):
            assert torch.equal(each(x, mask), model(x, mask))
            assert fe.inspect(each).totals["never_ran"] == 0
    layer = model.encoder.layers[0]
    for module, kind in ((layer, nn.TransformerEncoderLayer), (model.encoder, nn.TransformerEncoder)):
        assert isinstance(module, kind)
        assert type(module).__name__ == kind.__name__
    assert (vars(layer)["activation_relu_or_gelu"], vars(model.encoder)["use_nested_tensor"]) == (1, True)


def test_an_encoder_whose_layers_are_left_alone_keeps_its_fast_path():
    model = converted(Classifier(), overrides={"out": "rowwise"}, skip=lambda name, module: name != "out").eval()
    plain = Classifier().eval()
    x, mask = inputs()
    with torch.no_grad():
        assert torch.equal(model.encoder(x, src_key_padding_mask=mask), plain.encoder(x, src_key_padding_mask=mask))
    assert type(model.encoder) is nn.TransformerEncoder


def test_a_nested_tensor_is_refused_by_layer():
    nested = torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(5, 32)])
    with pytest.raises(fe.errors.UnsupportedDtype, match=r"linear1: input is .*, nested"), torch.no_grad():
        converted(Classifier()).eval()(nested)


def test_a_decoder_layer_trains_and_an_encoder_trains_and_compiles():
    decoder, model, x = converted(nn.TransformerDecoderLayer(**SIZE)), converted(Classifier()), inputs()[0]
    for each, y in ((decoder, decoder(x, x)), (model, model(x))):
        y.square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in each.parameters())
    ran = {row["name"] for row in fe.inspect(decoder).layers if row["ran"] and row["recipe"] == "current"}
    assert ran == {"linear1", "linear2"}
    del model.eval().encoder.layers[1]  # the first is compiled as the second
    with torch.no_grad():
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x))


class Calls(nn.MultiheadAttention):
    """A subclass that calls its projection."""

    def forward(self, query, key, value, **options):
        return self.out_proj(query), None


def test_an_attention_that_calls_its_projection_has_it_in_fp8():
    model = converted(Calls(32, 2))
    model(*[torch.randn(2, 3, 32)] * 3)
    rows = fe.inspect(model).layers
    assert [(row["name"], row["recipe"]) for row in rows] == [("in_proj_weight", "none"), ("out_proj", "current")]
    assert rows[1]["ran"]


class Mamba(nn.Module):
    """Mamba's mixer: the weight of `dt_proj` is read and multiplied by; a helper reads another."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.in_proj, self.dt_proj, self.x_proj = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return _by_hand(self.x_proj, (self.dt_proj.weight @ self.in_proj(kernel(x)).mT).mT)


def _by_hand(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.t() + layer.bias


def watching(model: nn.Module) -> bool:
    """Whether a hook of the first forward is left."""
    hooks = (*model._forward_pre_hooks.values(), *model._forward_hooks.values())
    return any(isinstance(getattr(hook, "__self__", None), FirstForward) for hook in hooks)


def said(call) -> list[str]:
    """The warnings of one call, as text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(issubclass(each.category, fe.errors.BypassWarning) for each in caught)
    return [str(each.message) for each in caught]


def test_weights_read_directly_are_warned_of_once_by_name_and_count():
    model = converted(Model(Eva(), Mamba(), Eva()))
    x = torch.randn(2, 4, 16)
    assert watching(model)
    (text,) = said(lambda: model(x).sum().backward())
    names = "parts.0.qkv, parts.1.dt_proj, parts.1.x_proj, parts.2.qkv"
    assert text.startswith(f"4 converted layer(s) did not run in FP8: {names}. ")
    assert said(lambda: model(x)) == []
    why = {row["name"]: row["reason"] for row in fe.inspect(model).layers if not row["ran"]}
    assert why.keys() == set(names.split(", "))
    assert why["parts.0.qkv"] == "never ran: its weight is read directly, its forward was not called"
    assert not watching(model)
    assert [type(m) for m in model.modules() if isinstance(m, nn.Linear)] == [fe.Linear] * 7


def test_strict_makes_it_an_error(monkeypatch):
    monkeypatch.setattr("fp8engine.ops.matmul.why_emulated", lambda *args: "")
    model = fe.convert(Model(Eva()), "current", strict=True)
    with pytest.raises(fe.errors.StrictError, match=r"1 converted layer\(s\) did not run in FP8: parts\.0\.qkv\. "):
        model(torch.randn(2, 4, 16))


def test_layers_that_are_not_called_and_not_read_are_no_news():
    model = converted(Model(Asks(), unused=(Eva(),)))
    assert said(lambda: model(torch.randn(4, 16))) == []
    assert fe.inspect(model).totals["never_ran"] == 3
    assert not watching(model)


def test_neither_a_part_run_alone_nor_a_forward_that_fails_is_the_first_one():
    model = converted(Model(Eva()))
    assert said(lambda: model.parts[0](torch.randn(2, 4, 16))) == []
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.randn(2, 4, 15))
    assert [type(m) for m in model.modules() if isinstance(m, nn.Linear)] == [fe.Linear] * 2
    assert len(said(lambda: model(torch.randn(2, 4, 16)))) == 1


def test_two_threads_in_the_first_forward_leave_nothing_watched():
    model, x = converted(Model(Eva())), torch.randn(2, 4, 16)
    begun, left = threading.Event(), threading.Event()

    def slow(module, args):
        if threading.current_thread().name == "second":
            begun.set()
            assert left.wait(10)

    hook = model.parts[0].register_forward_pre_hook(slow)
    second = threading.Thread(target=model, args=(x,), name="second")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second.start()
        assert begun.wait(10)
        model(x)
        left.set()
        second.join(10)
    hook.remove()
    assert (len(caught), watching(model), said(lambda: model(x))) == (1, False, [])
    assert [type(m) for m in model.modules() if isinstance(m, nn.Linear)] == [fe.Linear] * 2


def test_copies_made_before_the_first_forward_speak_for_themselves():
    model, x = converted(Model(Eva())), torch.randn(2, 4, 16)
    for each in (copy.deepcopy(model), pickled(model), model):
        assert len(said(lambda each=each: each(x))) == 1
        assert said(lambda each=each: each(x)) == []
        assert not watching(each)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("alone", [False, True], ids=["a model", "its forward alone"])
def test_what_is_compiled_is_left_whole(alone: bool):
    """Its layers run inside of the graph, of which nothing on the host is told: that they were read proves nothing."""
    x, graphs = torch.randn(2, 4, 16), []
    for ran in (False, True):
        model, count = converted(Model(Eva())), CompileCounter()
        if ran:
            said(lambda model=model: model(x))
        torch._dynamo.reset()
        call: Any = torch.compile(model.forward if alone else model, backend=count, fullgraph=True)
        if alone:
            model.forward, call = call, model
        assert said(lambda call=call: [call(x) for _ in range(3)]) == []
        graphs.append(count.frame_count)
    assert graphs[0] == graphs[1], "nothing that its graph is guarded by has changed"


@pytest.mark.usefixtures("fresh")
def test_compiled_parts_are_not_watched():
    model, count, x = converted(Model(Eva(), Mamba())), CompileCounter(), torch.randn(2, 4, 16)
    model.parts[0].compile(backend=count, fullgraph=True)
    model.parts.append(torch.compile(converted(Model(Eva())), backend="eager"))
    (text,) = said(lambda: [model(x) for _ in range(3)])
    assert text.startswith("2 converted layer(s) did not run in FP8: parts.1.dt_proj, parts.1.x_proj. ")
    assert count.frame_count == 1, "nothing that its graphs are guarded by has changed"


class ReadsInTraining(nn.Module):
    """Clamps a weight in training, and calls the layer in evaluation, as Gemma 3n's AltUp does; of two tensors."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)

    def forward(self, x, scale):
        h = self.first(x)
        if self.training:
            return scale * nn.functional.linear(h, self.second.weight.clamp(-9, 9))
        return scale * self.second(h)


def test_a_weight_read_in_both_modes_is_told_once():
    model, x = converted(ReadsInTraining()), torch.randn(4, 32)
    model.forward = lambda x: nn.functional.linear(model.first(x), model.second.weight)
    with pytest.warns(fe.errors.BypassWarning, match="1 converted layer.*: second"), torch.no_grad():
        model.eval()(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train()(x)
    assert fe.inspect(model).layers[1]["reason"].startswith("never ran: its weight is read directly")


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_weight_read_in_training_alone_is_told_whichever_mode_comes_first(evaluated: bool):
    model, x, scale = converted(ReadsInTraining()), torch.randn(4, 32), torch.ones(32)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 * evaluated):
            model.eval()(x, scale)
    with pytest.warns(fe.errors.BypassWarning, match="1 converted layer.*: second"):
        model.train()(x, scale).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, scale).sum().backward()
        model.eval()(x, scale)
    hooks = (*model._forward_hooks.values(), *model._forward_pre_hooks.values())
    assert not any(isinstance(getattr(hook, "__self__", None), FirstForward) for hook in hooks)
    rows = {row["name"]: row["reason"] for row in fe.inspect(model).layers}
    assert "read directly" in rows["second"]
    assert "read directly" not in rows["first"]
