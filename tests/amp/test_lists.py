"""The lists are torch's own: by torch's dispatcher, by what torch computes, and with what a user moves."""

import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_tables import AutocastCPUTestLists, AutocastTestLists, opened

from fp8engine.amp.lists import KINDS, UNLISTED, OpLists, canonical, defaults
from fp8engine.errors import OpListError, UnknownName

CPU = AutocastCPUTestLists("cpu")


def operators_of(key: str) -> set[str]:
    """Operators that torch itself has registered for autocast on a device."""
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        is_there = schema.name.startswith("aten::") and torch._C._dispatch_has_kernel(name)
        if is_there and torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            found.add(schema.name.removeprefix("aten::"))
    return found


def test_the_cpu_lists_hold_just_what_torch_registers():
    assert operators_of("AutocastCPU") == set(defaults("cpu"))


def test_the_cuda_lists_hold_just_what_torch_registers():
    # cuDNN's RNN is registered by builds with CUDA only, rms_norm not yet by torch 2.11
    assert operators_of("AutocastCUDA") | {"_cudnn_rnn", "rms_norm"} == set(defaults("cuda"))


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_every_entry_has_its_place_and_a_reason_of_one_line(device_type: str):
    for name, place in defaults(device_type).items():
        assert place.kind in (*KINDS, "banned"), name
        assert 20 < len(place.reason) < 140, name
        assert "\n" not in place.reason, name


@pytest.mark.parametrize("case", [*CPU.torch_16, *CPU.nn_16], ids=lambda case: case[0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_white_on_a_cpu_is_what_torch_runs_in_16_bits(case: tuple, dtype: torch.dtype):
    name, function, args, kwargs = opened(case)
    with torch.autocast("cpu", dtype=dtype):
        result = function(*args, **kwargs)
    assert (result[0] if isinstance(result, tuple) else result).dtype == dtype
    assert OpLists().where(name, "cpu").kind == "white"


@pytest.mark.parametrize("case", [*CPU.torch_fp32, *CPU.nn_fp32], ids=lambda case: case[0])
def test_black_on_a_cpu_is_what_torch_runs_in_fp32(case: tuple):
    name, function, args, kwargs = opened(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert function(*args, **kwargs).dtype == torch.float32
    assert OpLists().where(name, "cpu").kind == "black"


@pytest.mark.parametrize("case", CPU.torch_need_autocast_promote, ids=lambda case: case[0])
def test_gray_on_a_cpu_is_what_torch_promotes(case: tuple):
    name, function, args, _ = opened(case[:2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert function(*args).dtype == torch.float32
    assert OpLists().where(name, "cpu").kind == "gray"


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
    assert OpLists().where("cross_entropy", "cpu").kind == "black"
    assert OpLists().where("cross_entropy", "cuda").kind == "black"
    assert OpLists().where("einsum", "cpu").kind == "white"
    assert OpLists().where("grid_sample", "cuda").kind == "gray"
    assert OpLists().where("gelu", "cuda") is UNLISTED


def test_a_moved_function_says_where_it_came_from():
    place = OpLists(white=["softmax"]).where("F.softmax", "cuda")
    assert place.kind == "white"
    assert "torch: black (sums of exponentials" in place.reason


def test_lists_are_values():
    one = OpLists(white=["softmax", "exp"], black=("matmul",))
    same = OpLists(black={"torch.matmul"}, white=["torch.exp", "torch.nn.functional.softmax", "exp"])
    assert one == same
    assert hash(one) == hash(same)
    assert one != OpLists(white=["softmax"])
    assert one != OpLists(white=["matmul"], black=["softmax", "exp"])
    assert pickle.loads(pickle.dumps(one)) == one
    assert copy.deepcopy(one) == one
    with pytest.raises(AttributeError):
        one.white = ()  # pyright: ignore[reportAttributeAccessIssue]  frozen is what is tested


def test_lists_print_what_differs_from_torchs():
    assert repr(OpLists()) == "OpLists()"
    assert repr(OpLists(gray=["exp"], black=["bmm", "addmm"])) == "OpLists(black=['addmm', 'bmm'], gray=['exp'])"
    assert not OpLists()
    assert OpLists(gray=["exp"])


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("softmax", "softmax"),
        ("torch.softmax", "softmax"),
        ("torch.nn.functional.softmax", "softmax"),
        ("torch.Tensor.softmax", "softmax"),
        ("torch.special.softmax", "softmax"),
        ("special.expit", "sigmoid"),
        ("torch.linalg.norm", "linalg_norm"),
        ("torch.fft.rfft2", "fft_rfft2"),
        ("__matmul__", "matmul"),
        ("__truediv__", "div"),
        ("torch.true_divide", "div"),
        ("__rpow__", "pow"),
        ("__mod__", "remainder"),
        ("arcsin", "asin"),
    ],
)
def test_a_function_has_one_name(spelt: str, name: str):
    assert canonical(spelt) == name


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("sofmax", "did you mean 'softmax'"),
        ("torch.linalg.nrom", "linalg_norm"),
        ("exp_", "did you mean 'exp'"),
        ("cross_entropy_loss", "'cross_entropy'"),
        ("torch.nn.Linear", "'linear'"),
        ("", "are known"),
        ("__nothing__", "are known"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(name: str, near: str):
    with pytest.raises(UnknownName, match="unknown function of torch") as error:
        OpLists(black=[name])
    assert near in str(error.value)


def test_a_function_in_two_lists_is_an_error_under_any_of_its_names():
    with pytest.raises(OpListError, match=r"'matmul' is in white= and in gray=.*take it out"):
        OpLists(white=["matmul"], gray=["torch.Tensor.__matmul__"])
    with pytest.raises(OpListError, match="'softmax' is in white= and in black="):
        OpLists(black=["softmax"], white=["torch.special.softmax"])


def test_a_list_is_a_list_of_strings():
    with pytest.raises(OpListError, match=r"black=\['softmax'\]"):
        OpLists(black="softmax")
    with pytest.raises(OpListError, match="'softmax' as a string"):
        OpLists(black=[torch.nn.functional.softmax])  # pyright: ignore[reportArgumentType]  the mistake itself


def test_a_device_without_known_lists_is_an_error():
    with pytest.raises(UnknownName, match="unknown device with default lists 'mps'"):
        OpLists().where("softmax", "mps")
