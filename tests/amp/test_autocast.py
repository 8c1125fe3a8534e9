"""fe.amp.autocast: torch's where nothing is moved, the lists where something is; gradients, nesting, modules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_tables import AutocastCPUTestLists, opened

from fp8engine.amp.autocast import autocast
from fp8engine.amp.lists import UNLISTED, OpLists
from fp8engine.errors import BackendError, OpListError, UnknownName, UnsupportedDtype

HALF = torch.float16
COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")
TABLE = AutocastCPUTestLists("cpu")
CASTS = [("white", each) for each in TABLE.torch_16 + TABLE.nn_16]
CASTS += [("black", each) for each in TABLE.torch_fp32 + TABLE.nn_fp32]
PROMOTES = [("gray", each) for each in TABLE.torch_need_autocast_promote]  # with arguments of BF16, of FP16
PROMOTES += [(UNLISTED.kind, each) for each in TABLE.torch_expect_builtin_promote]
CASES = [(kind, dtype, case) for dtype in (torch.bfloat16, HALF) for kind, case in CASTS]
CASES += [(kind, dtype, (case[0], case[i])) for kind, case in PROMOTES for i, dtype in ((1, torch.bfloat16), (2, HALF))]
U = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # one rounding, relative


@pytest.mark.parametrize("lists", [OpLists(), OpLists(black=["erfc"])], ids=["unchanged", "another moved"])
@pytest.mark.parametrize(("kind", "dtype", "case"), CASES, ids=lambda v: v[0] if isinstance(v, tuple) else str(v))
def test_what_no_list_moves_is_as_under_torch_autocast(kind: str, dtype: torch.dtype, case: tuple, lists: OpLists):
    name, function, args, kwargs = opened(case)
    with torch.autocast("cpu", dtype=dtype):
        want = function(*args, **kwargs)
    with autocast("cpu", dtype=dtype, lists=lists):
        got = function(*args, **kwargs)
    got, want = (each if isinstance(each, tuple) else (each,) for each in (got, want))
    assert lists.where(name, "cpu").kind == kind
    assert want[0].dtype == (torch.bool if name in COMPARISONS else dtype if kind == "white" else torch.float32)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


x = torch.linspace(0.1, 2, 16).view(4, 4)
SPELLINGS = {
    "softmax": [lambda: torch.softmax(x, -1), lambda: F.softmax(x, dim=-1), lambda: x.softmax(-1),
                lambda: torch.special.softmax(x, -1), lambda: nn.Softmax(-1)(x)],
    "matmul": [lambda: x @ x, lambda: torch.matmul(x, x), lambda: x.matmul(x), lambda: x.__rmatmul__(x),
               lambda: torch.linalg.matmul(x, x)],
    "pow": [lambda: x**2, lambda: 2**x, lambda: torch.pow(x, 2), lambda: x.pow(2)],
    "sub": [lambda: x - x, lambda: 1 - x, lambda: torch.sub(x, 1), lambda: torch.subtract(x, 1)],
    "add": [lambda: x + 1, lambda: 1 + x, lambda: torch.add(x, x)],
    "mul": [lambda: x * 2, lambda: 2 * x, lambda: torch.multiply(x, x)],
    "div": [lambda: x / 2, lambda: 2 / x, lambda: torch.true_divide(x, 2)],
    "layer_norm": [lambda: F.layer_norm(x, (4,)), lambda: nn.LayerNorm(4)(x)],
    "linear": [lambda: F.linear(x, x), lambda: nn.Linear(4, 4)(x)],
    "cross_entropy": [lambda: F.cross_entropy(x, x), lambda: nn.CrossEntropyLoss()(x, x.argmax(-1))],
    "gelu": [lambda: F.gelu(x), lambda: nn.GELU()(x)],
    "linalg_norm": [lambda: torch.linalg.norm(x)],
}  # fmt: skip


@pytest.mark.parametrize(("name", "call"), [(name, call) for name, calls in SPELLINGS.items() for call in calls])
def test_one_name_holds_for_all_spellings(name: str, call):
    dtypes = {}
    for kind in ("white", "black", "gray"):
        with autocast("cpu", dtype=HALF, lists=OpLists(**{kind: [name]})):
            dtypes[kind] = call().dtype
    assert dtypes == {"white": HALF, "black": torch.float32, "gray": torch.float32}


def test_moved_functions_compute_with_cast_inputs():
    a, b = torch.randn(8, 16), torch.randn(16, 8)
    with autocast("cpu", dtype=torch.bfloat16, lists=OpLists(white=["softmax"], black=["matmul"], gray=["linear"])):
        black, white = a.bfloat16() @ b, torch.softmax(a, -1)
        gray = F.linear(a.bfloat16(), b.t()), F.linear(a.bfloat16(), b.t().bfloat16()), F.linear(a.half(), a.bfloat16())
    assert torch.equal(black, a.bfloat16().float() @ b)
    assert torch.equal(white, torch.softmax(a.bfloat16(), -1))
    assert torch.equal(gray[0], F.linear(a.bfloat16().float(), b.t()))
    assert torch.equal(gray[1], F.linear(a.bfloat16(), b.t().bfloat16()))
    assert torch.equal(gray[2], F.linear(a.half().float(), a.bfloat16().float()))  # FP16 and BF16 meet in FP32


TREATED = {
    "a list of tensors": (lambda: torch.cat([x, x]), HALF),
    "a keyword with tensors": (lambda: torch.cat(tensors=(x, x.half())), HALF),
    "keywords": (lambda: F.conv2d(input=x.half()[None, None], weight=x[None, None]), torch.float32),
    "FP64, white": (lambda: x.double() + 1, torch.float64),
    "FP64, black": (lambda: x.double().exp(), torch.float64),
    "integers": (lambda: torch.arange(3) + 1, torch.int64),
    "another device": (lambda: torch.softmax(torch.empty(4, 4, device="meta"), -1), torch.float32),
    "in place": (lambda: x.half().exp_(), HALF),
    "out=": (lambda: torch.exp(x.half(), out=torch.empty(4, 4, dtype=HALF)), HALF),
    "inplace=True": (lambda: F.relu(-x.half(), inplace=True), HALF),
}


@pytest.mark.parametrize("case", TREATED)
def test_what_is_cast_and_what_is_left_alone(case: str):
    call, dtype = TREATED[case]
    with autocast("cpu", dtype=HALF, lists=OpLists(white=["cat", "add", "softmax"], black=["conv2d", "exp", "relu"])):
        assert call().dtype == dtype


def test_a_batch_norm_in_16_bits_keeps_its_running_statistics():
    norm, inputs = nn.BatchNorm1d(4), torch.randn(64, 4)
    running: Any = norm.running_mean
    with autocast("cpu", dtype=torch.bfloat16, lists=OpLists(white=["batch_norm"])):
        assert norm(inputs).dtype == torch.bfloat16
    # 0.9 * 0 + 0.1 * mean of the rounded inputs, in FP32: 64 additions
    torch.testing.assert_close(running.double(), 0.1 * inputs.bfloat16().double().mean(0), rtol=0, atol=64 * 2.0**-24)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_a_largest_norm_renormalises_its_weight(kind: Any):
    layer = kind(3, 4, max_norm=1.0)
    nn.init.constant_(layer.weight, 10.0)
    with autocast("cpu", torch.float16, lists=OpLists(white=["embedding", "embedding_bag"])):
        assert layer(torch.tensor([[0, 1]])).dtype == torch.float16
    # The norm is divided by itself + 1e-7, and rounded a few times.
    torch.testing.assert_close(layer.weight.norm(dim=1), torch.tensor([1.0, 1.0, 20.0]), rtol=2.0**-20, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_under_changed_lists_against_float64(dtype: torch.dtype):
    given = torch.rand(8, 16, requires_grad=True), torch.rand(16, 16, requires_grad=True)
    exact = [value.detach().double().requires_grad_() for value in given]
    loss = lambda a, b: (torch.tanh(a @ b / 16) * a).sum()  # noqa: E731
    with autocast("cpu", dtype=dtype, lists=OpLists(black=["matmul"], white=["tanh"], gray=["mul"])):
        ours = torch.autograd.grad(loss(*given), given)
    for got, want in zip(ours, torch.autograd.grad(loss(*exact), exact), strict=True):
        assert got.dtype == torch.float32
        # hidden, tanh, its gradient in and out and 1 - tanh^2 (twice) are rounded to 16 bits, six in all, all of
        # one sign: 6 u of the sum of magnitudes, of which the largest gradient is one; the products are FP32
        assert (got - want).abs().max() <= 6 * U[dtype] * want.abs().max()


def test_inner_lists_win_and_the_rest_is_inherited():
    with autocast("cpu", dtype=HALF, lists=OpLists(black=["matmul"], white=["softmax"])):
        with autocast("cpu", dtype=torch.bfloat16, lists=OpLists(white=["matmul"])):
            assert (x @ x).dtype == x.softmax(-1).dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):  # torch's own sets the dtype
            assert x.softmax(-1).dtype == torch.bfloat16
        with autocast("cpu"):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.float32
        assert x.softmax(-1).dtype == HALF


@pytest.mark.parametrize("off", [autocast("cpu", enabled=False), torch.autocast("cpu", enabled=False)])
def test_enabled_false_inside_turns_everything_off(off):
    with autocast("cpu", dtype=HALF, lists=OpLists(black=["exp"], white=["softmax"])):
        with off:
            assert x.softmax(-1).dtype == torch.float32
            assert (x @ x).dtype == torch.float32
            assert x.half().exp().dtype == HALF
        assert x.softmax(-1).dtype == HALF


def test_an_object_serves_again_nested_in_itself_after_an_error_and_as_a_decorator():
    amp = autocast("cpu", dtype=HALF, lists=OpLists(white=["softmax"]))

    @amp
    def deep(level: int) -> list[torch.dtype]:
        """Says what it is."""
        return [x.softmax(-1).dtype, *(deep(level - 1) if level else [])]

    with amp, amp:
        assert x.softmax(-1).dtype == HALF
    with pytest.raises(ZeroDivisionError), amp:
        _ = 1 / 0
    assert not torch.is_autocast_enabled("cpu")
    assert deep(2) == [HALF] * 3
    assert deep.__doc__ == "Says what it is."
    assert x.softmax(-1).dtype == torch.float32


def test_attention_and_recurrent_modules_by_the_name_of_their_function():
    attention, layer, lstm = nn.MultiheadAttention(4, 2), nn.TransformerEncoderLayer(4, 2, 8).eval(), nn.LSTM(4, 4)
    with autocast("cpu", dtype=torch.bfloat16, lists=OpLists(black=["multi_head_attention_forward", "lstm"])):
        assert attention(x, x, x, need_weights=True)[0].dtype == torch.float32
        assert lstm(x.bfloat16())[0].dtype == torch.float32
    hidden = ["multi_head_attention_forward", "linear", "layer_norm"]
    with torch.no_grad(), autocast("cpu", dtype=torch.bfloat16, lists=OpLists(black=hidden)):
        # the fused path of TransformerEncoderLayer would hide both; torch does not take it under autocast
        assert layer(x).dtype == torch.float32


def test_what_a_function_hides_is_said_and_its_remedy_works():
    q = torch.randn(1, 2, 4, 8)
    lists = OpLists(black=["softmax"])
    with autocast("cpu", dtype=HALF, lists=lists):
        with pytest.warns(UserWarning, match="scaled_dot_product_attention computes it inside, where it stays white"):
            assert F.scaled_dot_product_attention(q, q, q).dtype == HALF
        with pytest.warns(UserWarning, match="list 'multi_head_attention_forward' as well"):
            nn.MultiheadAttention(4, 2)(x, x, x)
        assert F.cross_entropy(x, x).dtype == torch.float32  # black on its own: nothing to say
    with autocast("cpu", dtype=HALF, lists=OpLists(black=["softmax", "scaled_dot_product_attention"])):
        assert F.scaled_dot_product_attention(q, q, q).dtype == torch.float32


@pytest.mark.parametrize(
    ("function", "moved", "call"),
    [
        ("inner", "matmul", lambda: torch.inner(x, x)),
        ("linalg_multi_dot", "matmul", lambda: torch.linalg.multi_dot([x, x, x])),
        ("gru", "linear", lambda: nn.GRU(4, 4)(x)[0]),
        ("rnn_tanh", "linear", lambda: nn.RNN(4, 4)(x)[0]),
        ("rnn_relu", "linear", lambda: nn.RNN(4, 4, nonlinearity="relu")(x)[0]),
        ("norm", "linalg_vector_norm", lambda: x.half().norm()),
        ("normalize", "norm", lambda: F.normalize(x.half())),
        ("tensordot", "matmul", lambda: torch.tensordot(x, x, 1)),
    ],
)
def test_each_function_that_computes_a_moved_one_inside_says_so(function: str, moved: str, call: Callable):
    torch.manual_seed(0)
    with (
        autocast("cpu", dtype=HALF, lists=OpLists(black=[moved])),
        pytest.warns(UserWarning, match=f"'{moved}' is black .* {function} computes it inside"),
    ):
        rounded = call()
    torch.manual_seed(0)
    with autocast("cpu", dtype=HALF, lists=OpLists(black=[moved, function])):
        cured = call()
    assert cured.dtype == torch.float32
    assert not torch.equal(cured, rounded.float())


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A card without a card: tensors that have a device and a dtype, but no values.  Holds its capability."""
    capability = [(8, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None)  # a CUDA build's asks
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    return capability


def test_on_cuda_the_same_lists_hold(fake_cuda):
    with FakeTensorMode():
        a = torch.empty(4, 4, device="cuda")
        with autocast(lists=OpLists(white=["softmax"], black=["matmul", "binary_cross_entropy"], gray=["linear"])):
            moved = a.softmax(-1), a.half() @ a, F.linear(a, a.half())
            assert [y.dtype for y in moved] == [HALF, torch.float32, torch.float32]
            assert (torch.mm(a, a).dtype, a.half().exp().dtype) == (HALF, torch.float32)  # torch's
            assert torch.empty(4, 4).softmax(-1).dtype == torch.float32  # a CPU tensor
            assert F.binary_cross_entropy(a.half(), a.half()).dtype == torch.float32  # banned, unless it is listed
        with autocast(), pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(a.half(), a.half())


def test_a_v100_takes_fp16_and_refuses_bf16_with_the_remedy(fake_cuda: list):
    fake_cuda[0] = (7, 0)
    with FakeTensorMode(), autocast():
        assert torch.mm(*torch.empty(2, 4, 4, device="cuda")).dtype == HALF
    with pytest.raises(BackendError, match=r"Tesla \(sm_70\) has no BF16.*torch.float16 with fe.amp.GradScaler"):
        autocast("cuda", dtype=torch.bfloat16)
    autocast("cuda", dtype=torch.bfloat16, enabled=False)
    autocast("cpu", dtype=torch.bfloat16)


def test_without_a_card_the_cpu_is_taken_and_cuda_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # on a machine with one, too
    assert autocast().device_type == "cpu"
    with pytest.raises(BackendError, match='no CUDA device here; say "cpu"'):
        autocast("cuda")
    with autocast("cuda", enabled=False):
        assert (x @ x).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device_type": "cdua"}, UnknownName, "did you mean 'cuda'"),
        ({"device_type": torch.device("cpu")}, UnknownName, "known: cuda, cpu"),
        ({"device_type": "cuda", "device": torch.device("cpu")}, UnknownName, "beside device_type 'cpu'"),
        ({"device_type": "cpu", "dtype": torch.float32}, UnsupportedDtype, "say enabled=False"),
        ({"device_type": "cpu", "dtype": "float16"}, UnsupportedDtype, "torch.float16 or torch.bfloat16"),
        ({"device_type": "cpu", "lists": ["softmax"]}, OpListError, r"takes fe.amp.OpLists\(white"),
    ],
)
def test_bad_arguments_are_errors_with_the_remedy(arguments: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        autocast(**arguments)


@pytest.mark.parametrize(
    "named", [{"device_type": "cpu:0"}, {"device": "cpu"}, {"device": torch.device("cpu")}], ids=str
)
def test_a_device_may_have_a_number_and_be_called_device(named: dict):
    with autocast(**named, lists=OpLists(black=["exp"])):
        assert x.half().exp().dtype == torch.float32
