"""The lists are torch's own, by torch's dispatcher and its tests; by what it computes: test_autocast.py."""

import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_tables import AutocastTestLists

from fp8engine.amp.lists import KINDS, UNLISTED, OpLists, canonical, defaults
from fp8engine.errors import OpListError, UnknownName


def operators_of(key: str) -> set[str]:
    """Operators that torch itself has registered for autocast on a device."""
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        is_there = schema.name.startswith("aten::") and torch._C._dispatch_has_kernel(name)
        if is_there and torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            found.add(schema.name.removeprefix("aten::"))
    return found


@pytest.mark.parametrize(("key", "device_type"), [("AutocastCPU", "cpu"), ("AutocastCUDA", "cuda")])
def test_the_lists_hold_just_what_torch_registers_each_with_a_reason_of_one_line(key: str, device_type: str):
    # cuDNN's RNN is registered by builds with CUDA only, rms_norm not yet by torch 2.11
    more = {"_cudnn_rnn", "rms_norm"} if device_type == "cuda" else set()
    assert operators_of(key) | more == set(defaults(device_type))
    for name, place in defaults(device_type).items():
        assert place.kind in (*KINDS, "banned"), name
        assert 20 < len(place.reason) < 140, name
        assert "\n" not in place.reason, name


def test_the_cuda_lists_are_those_of_torchs_own_tests():
    # shapes and dtypes of tensors on a card, without one
    with FakeTensorMode():
        cuda = AutocastTestLists("cuda")
    tables = {
        "white": cuda.torch_fp16 + cuda.nn_fp16 + cuda.linalg_fp16,
        "black": cuda.torch_fp32 + cuda.nn_fp32,
        "gray": cuda.torch_need_autocast_promote,
        "banned": cuda.banned,
    }
    for kind, table in tables.items():
        for name in {case[0] for case in table}:
            assert OpLists().where(name, "cuda").kind == kind, name


def test_a_reason_can_be_asked_for_functions_that_torch_knows_by_another_name():
    asked = [("cross_entropy", "cpu"), ("cross_entropy", "cuda"), ("einsum", "cpu"), ("grid_sample", "cuda")]
    assert [OpLists().where(*each).kind for each in asked] == ["black", "black", "white", "gray"]
    assert OpLists().where("gelu", "cuda") is UNLISTED
    moved = OpLists(white=["softmax"]).where("F.softmax", "cuda")
    assert moved.kind == "white"
    assert "torch: black (sums of exponentials" in moved.reason
    with pytest.raises(UnknownName, match="unknown device with default lists 'mps'"):
        OpLists().where("softmax", "mps")


def test_lists_are_values():
    one = OpLists(white=["softmax", "exp"], black=("matmul",))
    same = OpLists(black={"torch.matmul"}, white=["torch.exp", "torch.nn.functional.softmax", "exp"])
    assert one == same == pickle.loads(pickle.dumps(one)) == copy.deepcopy(one)
    assert hash(one) == hash(same)
    assert one != OpLists(white=["softmax"])
    assert one != OpLists(white=["matmul"], black=["softmax", "exp"])
    with pytest.raises(AttributeError):
        one.white = ()  # pyright: ignore[reportAttributeAccessIssue]  frozen is what is tested


def test_lists_print_what_differs_from_torchs():
    assert repr(OpLists()) == "OpLists()"
    assert repr(OpLists(gray=["exp"], black=["bmm", "addmm"])) == "OpLists(black=['addmm', 'bmm'], gray=['exp'])"
    assert not OpLists()
    assert OpLists(gray=["exp"])


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("softmax", "softmax torch.softmax torch.nn.functional.softmax torch.Tensor.softmax torch.special.softmax"),
        ("sigmoid", "special.expit"), ("linalg_norm", "torch.linalg.norm"), ("fft_rfft2", "torch.fft.rfft2"),
        ("matmul", "__matmul__"), ("div", "__truediv__ torch.true_divide"), ("pow", "__rpow__"), ("asin", "arcsin"),
        ("remainder", "__mod__"), ("log_sigmoid", "F.logsigmoid"), ("hardswish", "torch.nn.functional.hardswish"),
    ],
)  # fmt: skip
def test_a_function_has_one_name(name: str, spellings: str):
    assert {canonical(spelt) for spelt in spellings.split()} == {name}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("sofmax", "did you mean 'softmax'"), ("torch.linalg.nrom", "linalg_norm"), ("exp_", "did you mean 'exp'"),
        ("cross_entropy_loss", "'cross_entropy'"), ("torch.nn.Linear", "'linear'"), ("", "are known"),
        ("__nothing__", "are known"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_an_error_with_the_nearest(name: str, near: str):
    with pytest.raises(UnknownName, match="unknown function of torch") as error:
        OpLists(black=[name])
    assert near in str(error.value)


@pytest.mark.parametrize(
    ("lists", "told"),
    [
        ({"white": ["matmul"], "gray": ["torch.Tensor.__matmul__"]}, "'matmul' is in white= and in gray=.*take it out"),
        ({"black": ["softmax"], "white": ["torch.special.softmax"]}, "'softmax' is in white= and in black="),
        ({"black": "softmax"}, r"black=\['softmax'\]"),
        ({"black": [torch.nn.functional.softmax]}, "'softmax' as a string"),
    ],
)
def test_lists_that_are_refused(lists: dict, told: str):
    with pytest.raises(OpListError, match=told):
        OpLists(**lists)
