"""Our Triton kernels as a backend: when they can be used, what they refuse, and when they are chosen by themselves."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from casts import E4M3, E5M2, cast_of

import fp8engine as fe
from benchmarks.machine_code import offline
from fp8engine.errors import BackendError, ShapeError, VersionError
from fp8engine.numerics.cast import Cast
from fp8engine.ops import backends, casts, device, matmul, reference, scaled_mm, triton_backend, twins
from fp8engine.ops.reference import Epilogue, Operand

pytestmark = pytest.mark.usefixtures("pretended")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def ratio(monkeypatch: pytest.MonkeyPatch):
    """Pretend that the tuner measured this ratio for every shape, and return the operations that were looked up."""

    def pretend(value: float | None) -> list[str]:
        tuning, asked = importlib.import_module("fp8engine.kernels.tuning"), []
        pick = tuning.pick

        def measured(operation, *rest):
            asked.append(operation)
            return pick(operation, *rest)._replace(ratio=value)

        monkeypatch.setattr(tuning, "pick", measured)
        triton_backend.measured.cache_clear()
        return asked

    return pretend


def operand(m: int = 4, k: int = 32, rows: int = -1, cols: int = -1, dtype=E4M3) -> Operand:
    return casts.quantize(torch.randn(m, k), cast_of(dtype, rows, cols))


@pytest.mark.parametrize(
    ("version", "error", "words"),
    [
        (None, BackendError, r"'triton' needs Triton, which is not installed: pip install 'triton>=3\.6,<3\.10'"),
        ((3, 5), VersionError, r"needs triton>=3\.6,<3\.10, and 3\.5 is installed"),
        ((3, 10), VersionError, r"needs triton>=3\.6,<3\.10, and 3\.10 is installed"),
    ],
)
def test_without_a_triton_that_fits_the_block_is_not_entered(version, error, words, monkeypatch, pretended):
    monkeypatch.setattr(triton_backend, "installed", lambda: version)
    with pytest.raises(error, match=words), fe.backend("triton"):
        pytest.fail("entered")
    assert backends.asked() is None
    # On a Hopper card scales along K then have no kernel, and are emulated: reported, never an error by surprise.
    monkeypatch.setattr(torch.version, "cuda", None)  # nor has a torch that was built without CUDA one of cuBLASLt's
    where = pretended((9, 0))
    assert matmul.choose(where, by_block=True) == "reference"
    assert matmul.why_emulated(where, "reference")
    assert triton_backend.measured("matmul_fp8", (9, 0), 4096, 4096) == 0.0


def test_versions_are_compared_as_numbers(monkeypatch):
    for version in ("3.6.0", "3.9.1", "3.7.1+git0123", "3.10.0"):
        monkeypatch.setattr(importlib.import_module("triton"), "__version__", version)
        triton_backend.installed.cache_clear()
        assert triton_backend.usable() is (version != "3.10.0")


def test_on_a_cpu_the_kernels_say_how_to_interpret_them():
    a, x = operand(), torch.randn(4, 32)
    layer = fe.Linear(32, 16, recipe="bf16")
    for call in (lambda: matmul.matmul(a, a), lambda: matmul.matmul_fp16(x.bfloat16(), x.bfloat16()), lambda: layer(x)):
        with fe.backend("triton"), pytest.raises(BackendError, match=r"no Triton kernels for cpu \(TRITON_INTERPRET=1"):
            call()


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_what_triton_does_not_compile_is_refused_by_name_and_left_to_cublas(capability, pretended, ratio):
    where = pretended(capability)
    ratio(1.5)  # measured on an H100, whose row such a card is given
    assert matmul.choose(where, by_block=False, shape=(8192, 8192)) == "cublas"
    assert matmul.choose_16_bits(where, (8192, 8192)) == "torch"
    there = operand()._replace(data=SimpleNamespace(device=where, dtype=E4M3))
    reason = triton_backend.unsupported(there, there) or ""
    assert f"fails to compile our matmuls for card of sm_{capability[0]}{capability[1]}" in reason
    assert "fe.backend('cublas')" in reason
    assert triton_backend.no_card(where) is None  # casts
    in_blocks = there._replace(scale=torch.ones(4, 1), rows=1, cols=128)
    assert triton_backend.unsupported(in_blocks, in_blocks) is None


def test_operands_that_no_kernel_takes(monkeypatch):
    monkeypatch.setattr(triton_backend, "no_card", lambda where: None)
    block, other = operand(cols=16, rows=1), operand(cols=32, rows=1)
    for a, b, words in [
        (operand(dtype=E5M2), operand(dtype=E5M2), "do not multiply E5M2 by E5M2"),
        (operand()._replace(data=torch.zeros(4, 32)), operand(), "not FP8 codes"),
        (block, block, r"every \[16\] values"),
        (block, other, r"every \[16, 32\] values"),
        (operand(rows=-1, cols=1), operand(), r"every \[1\] values"),
    ]:
        with pytest.raises(BackendError, match=words):
            triton_backend.matmul(a, b, Epilogue())
    assert triton_backend.unsupported(other, other) is None
    assert triton_backend.unsupported(other, operand()) is None
    assert triton_backend.unsupported(operand(rows=1), operand(dtype=E5M2)) is None


def test_16_bit_kernels_take_16_bits():
    x = torch.randn(4, 32)
    for a, b in [(x, x), (x.half(), x.bfloat16()), (x.bfloat16(), x)]:
        with pytest.raises(BackendError, match="want both float16 or both bfloat16"):
            triton_backend.matmul_fp16(a, b, Epilogue())
    with fe.backend("triton"):  # FP32 is not theirs, asked or not
        assert torch.equal(matmul.matmul_fp16(x, x), x @ x.t())


@pytest.mark.parametrize("name", ["reference", "cublas", "triton"])
def test_mismatched_operands_are_refused_before_any_backend(name):
    a = operand(4, 32)
    for b, bias_N, words in (
        (operand(5, 48), None, r"want a \[M, K\] and b \[N, K\], got \[4, 32\] and \[5, 48\]"),
        (a, torch.zeros(5), r"bias is \[5\]; b \[4, 32\] wants \[4\]"),
        (a._replace(scale=torch.ones(3, 1), rows=1), None, r"scale of b is \[3, 1\]; 1 x -1 groups of \[4, 32\] have"),
        (a._replace(scale=torch.ones(4, 2), rows=1, cols=128), None, r"b is \[4, 2\]; 1 x 128 .* have \[4, 1\]"),
    ):
        with fe.backend(name), pytest.raises(ShapeError, match=words):
            matmul.matmul(a, b, bias_N)


@pytest.mark.parametrize(("measured", "chosen"), [(None, "cublas"), (0.99, "cublas"), (1.0, "triton"), (1.2, "triton")])
def test_triton_is_chosen_where_it_was_measured_faster(measured, chosen, pretended, ratio):
    where, asked = pretended((9, 0)), ratio(measured)
    assert matmul.choose(where, False, (8192, 8192)) == chosen
    assert matmul.choose(where, False, (8192, 8192), "promoted") == chosen
    assert matmul.choose(where, False, (8192, 8192), "exact") == chosen
    assert asked == ["matmul_fp8", "matmul_fp8_promoted"]  # the third is remembered
    assert matmul.choose_16_bits(where, (8192, 8192)) == ("triton" if chosen == "triton" else "torch")
    assert matmul.choose(where, False) == "cublas"  # a shape that nobody knows was not measured
    assert matmul.choose(where, True, (8192, 8192)) == "triton"  # no other backend has FP8 Tensor Cores for blocks
    with fe.backend("reference"):
        assert matmul.choose(where, False, (8192, 8192)) == "reference"
        assert matmul.choose_16_bits(where, (8192, 8192)) == "torch"


@pytest.mark.parametrize(
    ("usable", "torch_can", "ratio", "k", "bias", "chosen"),
    [
        (True, True, 0.0, None, False, "triton"),  # nobody measured it
        (True, True, 1.1, None, False, "triton"),
        (True, True, 0.94, 4096, False, "cublas"),
        (True, True, 0.94, 4096, True, "triton"),  # torch's pass for the bias takes 1632 / K of its matmul's time
        (True, True, 0.94, 65536, True, "cublas"),
        (True, True, 0.94, None, True, "cublas"),
        (True, False, 0.94, 4096, False, "triton"),
        (False, True, 0.0, None, False, "cublas"),
        (False, False, 0.0, None, False, "reference"),
    ],
)
def test_which_backend_multiplies_blocks(monkeypatch, usable, torch_can, ratio, k, bias, chosen):
    monkeypatch.setattr(device, "has_fp8", lambda where: True)
    monkeypatch.setattr(device, "capability", lambda where: (9, 0))
    monkeypatch.setattr(triton_backend, "usable", lambda: usable)
    monkeypatch.setattr(triton_backend, "measured", lambda *asked: ratio)
    monkeypatch.setattr(scaled_mm, "no_blocks", lambda where: None if torch_can else "no")
    shape: Any = (8192, 14336) if k is None else (8192, 14336, k)
    assert matmul.choose(CUDA, True, shape, kind="block", bias=bias) == chosen
    if usable:  # of other blocks than those of 128, which have no kind, nothing was measured
        assert matmul.choose(CUDA, True, shape, kind=None, bias=bias) == "triton"
    if k:
        assert matmul.choose(CUDA, False, shape, kind="tensor", bias=bias) == "cublas"  # it adds the bias itself
        why = matmul.why_chosen(CUDA, shape, "fast", "block", chosen)
        assert why.startswith("kernels/tuning.json: our kernel runs 0.94 times as fast as torch's")
        assert ("the bias by a pass of its own" in why) == (chosen == "triton" and torch_can)
        assert why.endswith("as fast as torch's, which has no such blocks") == (not torch_can)


def test_no_ratio_is_committed_that_was_not_measured():
    tuning = importlib.import_module("fp8engine.kernels.tuning")
    content = importlib.import_module("json").loads(tuning.TABLE.read_text())
    ratios = [row.ratio for cards in tuning.table().values() for rows in cards.values() for row in rows.values()]
    assert content["source"] or set(ratios) == {None}


def test_a_backward_takes_over_the_backend_of_its_forward(monkeypatch):
    """autograd runs a card's backward in a thread that does not see the caller's `with`."""
    seen, real, multiply = [], matmul._matmul, twins.matmul
    spy = lambda a, b, *rest: seen.append(matmul._backend_of(a, b, rest[-1])[0]) or real(a, b, *rest)  # noqa: E731
    monkeypatch.setattr(matmul, "_matmul", spy)
    # On a CPU there is nothing to choose.
    monkeypatch.setattr(twins, "matmul", lambda *given: seen.append("reference") or multiply(*given))
    layer, x = fe.Linear(32, 16, recipe="current"), torch.randn(8, 32, requires_grad=True)
    with fe.backend("cublas"):
        y = layer(x)
    y.sum().backward()
    assert seen == ["cublas"] * 3
    seen.clear()
    layer(x).sum().backward()
    assert seen == [matmul.choose(x.device, False)] * 3


def test_values_held_for_an_emulated_matmul_are_not_taken_to_another_backend():
    layer, x = fe.Linear(32, 16, recipe="current"), torch.randn(8, 32, requires_grad=True)
    with fe.backend("reference"):
        y = layer(x)
    with fe.backend("cublas"), pytest.raises(BackendError, match="values held for an emulated matmul"):
        y.sum().backward()


def test_one_launch_updates_all_scales(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_backend, "no_card", lambda where: None)
    with offline.caught(90) as launches:
        triton_backend.scale_update(*(torch.empty(rows, 10_000, device="meta") for rows in (16, 2, 3)))
    assert len(launches) == 1


def test_which_groups_our_casts_take(pretended):
    """No blocks that are no power of two, or larger than a tile; and no launch for nothing."""
    where = pretended((9, 0))
    for text, ours in {"e4m3": 1, "e4m3 1x-1": 1, "e4m3 -1x1": 1, "e4m3 1x128": 1, "e5m2 32x32": 1,
                       "e4m3 1x100": 0, "e4m3 256x256": 0}.items():  # fmt: skip
        for rows in (4, 0):
            x = SimpleNamespace(device=where, numel=lambda rows=rows: rows * 4)
            found = casts._twin(x, Cast.parse(text))  # type: ignore[arg-type]
            assert found is (triton_backend if ours and rows else reference), text


def test_where_casts_run(pretended, monkeypatch):
    where = pretended((9, 0))
    with fe.backend("cublas"):  # has no casts of its own
        assert casts.choose(where) == "triton"
    with fe.backend("reference"):
        assert casts.choose(where) == "reference"
    assert casts.choose(torch.device("cpu")) == "reference"
    monkeypatch.setattr(triton_backend, "installed", lambda: None)
    assert casts.choose(where) == "reference"
