"""Lists of the functions that autocast runs in 16 bits and in FP32, the reason for each, and a user's changes.

| place | what happens to the inputs | which functions |
| --- | --- | --- |
| white | cast to FP16 or BF16 | products, where Tensor Cores pay: their sums are accumulated in FP32 anyway |
| black | cast to FP32 | exp, log, powers, softmax, norms, losses, long sums: FP16 ends at 65504 and has 11 bits |
| gray | mixed inputs are promoted to the widest of their dtypes | everything between, which follows its inputs |
| banned | torch raises | binary_cross_entropy on CUDA |

The lists are torch's own, which differ between CUDA and the CPU: on a CPU softmax, exp and the norms are gray.
Source: aten/src/ATen/autocast_mode.cpp and .h; tests/amp/test_lists.py compares them with the installed torch.
White and black are words of Micikevicius et al., "Mixed Precision Training" (2017), and of Paddle's AMP.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fp8engine import _torch
from fp8engine.errors import OpListError, UnknownName


class Place(NamedTuple):
    """The list that a function is in: kind is "white", "black", "gray" or "banned"; reason is one line."""

    kind: str
    reason: str


class _Group(NamedTuple):
    """Functions that are in one list for one reason: on both devices, on CUDA only, on the CPU only."""

    kind: str
    reason: str
    both: str = ""
    cuda: str = ""
    cpu: str = ""


# fmt: off
_GROUPS = (
    _Group("white", "a matrix product: Tensor Cores take 16-bit operands and add in FP32",
           both="addbmm addmm baddbmm bmm linalg_vecdot linear matmul mm",
           cuda="addmv addr chain_matmul einsum linalg_multi_dot mv",
           cpu="_addmm_activation"),
    _Group("white", "a convolution is a matrix product of patches: Tensor Cores pay",
           both="_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d",
           cuda="convolution cudnn_convolution cudnn_convolution_transpose"),
    _Group("white", "attention is two matrix products; its softmax is computed in FP32 inside the kernel",
           both="scaled_dot_product_attention",
           cuda="_scaled_dot_product_flash_attention", cpu="_native_multi_head_attention"),
    _Group("white", "a recurrent cell is matrix products between saturating functions",
           cuda="_cudnn_rnn _thnn_fused_gru_cell _thnn_fused_lstm_cell gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell",
           cpu="mkldnn_rnn_layer"),
    _Group("white", "one product per element, which cannot grow: its FP32 weight goes with its 16-bit input",
           both="prelu"),
    _Group("black", "steep: a rounding of its input becomes a larger error, and exp(11.1) or 1/1e-5 overflows FP16",
           cuda="acos asin cosh erfinv exp expm1 log log10 log1p log2 pow reciprocal rsqrt sinh softplus tan"),
    _Group("black", "sums of exponentials: small terms vanish in 11 bits",
           cuda="log_softmax logsumexp softmax"),
    _Group("black", "mean and variance are sums over a row, and squares over 255 overflow FP16",
           cuda="group_norm layer_norm native_layer_norm rms_norm"),
    _Group("black", "a long sum or product: 2048 + 1 = 2048 in FP16, and 65504 is its end",
           both="prod", cuda="cumprod cumsum sum", cpu="trace"),
    _Group("black", "a norm or distance: a sum of squares, and squares over 255 overflow FP16",
           both="cdist",
           cuda="cosine_similarity dist frobenius_norm linalg_matrix_norm linalg_vector_norm norm nuclear_norm pdist "
                "renorm"),
    _Group("black", "a loss: a long sum, whose small differences are the gradient",
           both="binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss "
                "margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d "
                "poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss",
           cpu="binary_cross_entropy cross_entropy_loss ctc_loss multilabel_margin_loss_forward"),
    _Group("black", "resampling: its gradient is a sum over pixels with small weights",
           cuda="_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d "
                "_upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d "
                "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d"),
    _Group("black", "torch runs this CPU kernel in FP32: not each of its parts has a 16-bit version",
           cpu="_grid_sampler_2d_cpu_fallback adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d "
               "fake_quantize_per_tensor_affine fractional_max_pool2d fractional_max_pool3d grid_sampler "
               "grid_sampler_2d grid_sampler_3d max_pool3d max_unpool2d max_unpool3d nanquantile polar quantile "
               "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d "
               "view_as_complex"),
    _Group("black", "a factorisation or a solution: LAPACK has FP32 and FP64 only",
           cpu="_lu_with_info cholesky cholesky_inverse cholesky_solve geqrf inverse linalg_cholesky "
               "linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh "
               "linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_qr "
               "linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve orgqr ormqr "
               "pinverse qr svd triangular_solve"),
    _Group("black", "a Fourier transform: a long sum, and the CPU's libraries have FP32 and FP64 only",
           cpu="fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 "
               "fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft"),
    _Group("gray", "several inputs, one dtype: promoted to the widest among them",
           cuda="addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot",
           cpu="cat index_copy stack"),
    _Group("banned", "torch refuses log(p) and log(1-p) of a 16-bit p: take binary_cross_entropy_with_logits, or list "
                     "it as black",
           cuda="binary_cross_entropy"),
)
# fmt: on
KINDS = ("white", "black", "gray")
UNLISTED = Place("gray", "not in torch's lists: follows its inputs; what it calls goes by its own entry")

# A function of Python that is known under another name where torch casts: the first of these that is listed.
_STANDS_WITH = {
    "cross_entropy": ("cross_entropy_loss", "log_softmax"),
    "einsum": ("bmm",),
    "grid_sample": ("grid_sampler",),
    "gru": ("_cudnn_rnn", "linear"),
    "gumbel_softmax": ("softmax",),
    "interpolate": ("upsample_bilinear2d",),
    "linalg_norm": ("linalg_vector_norm",),
    "lstm": ("_cudnn_rnn", "mkldnn_rnn_layer"),
    "rnn_relu": ("_cudnn_rnn", "linear"),
    "rnn_tanh": ("_cudnn_rnn", "linear"),
    "softmin": ("softmax",),
}

# One function under several names; special_x, and the operators of Python, are added by rule.
_ALIASES = {
    "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan", "atan2": "arctan2",
    "atanh": "arctanh", "abs": "absolute", "cat": "concat concatenate", "clamp": "clip", "cross": "linalg_cross",
    "det": "linalg_det", "digamma": "special_psi", "div": "divide true_divide __rdiv__ __truediv__",
    "inverse": "linalg_inv", "lgamma": "special_gammaln", "matmul": "linalg_matmul __rmatmul__", "mul": "multiply",
    "log_sigmoid": "logsigmoid", "neg": "negative",
    "pinverse": "linalg_pinv", "pow": "__rpow__", "sigmoid": "special_expit", "sub": "subtract rsub __rsub__",
    "floor_divide": "__floordiv__ __rfloordiv__", "remainder": "__mod__ __rmod__",
}  # fmt: skip

# Functions that compute others of these lists inside, where no mode of Python can see them.
_WITHIN = {
    "cross_entropy": ("log_softmax", "nll_loss"),
    "einsum": ("bmm", "matmul"),
    "gru": ("linear", "matmul"),
    "gumbel_softmax": ("softmax",),
    "inner": ("matmul",),
    "linalg_multi_dot": ("matmul",),
    "lstm": ("linear", "matmul"),
    "multi_head_attention_forward": ("baddbmm", "bmm", "linear", "scaled_dot_product_attention", "softmax"),
    "norm": ("linalg_vector_norm",),
    "normalize": ("linalg_vector_norm", "norm"),
    "rnn_relu": ("linear", "matmul"),
    "rnn_tanh": ("linear", "matmul"),
    "scaled_dot_product_attention": ("matmul", "softmax"),
    "softmin": ("softmax",),
    "tensordot": ("matmul",),
}


@functools.cache
def defaults(device_type: str = "cuda") -> dict[str, Place]:
    """torch's own lists on a device ("cuda" or "cpu"): operator -> its list and the reason.

    Raises UnknownName for a device whose lists are not known.

    >>> defaults("cuda")["softmax"].kind, "softmax" in defaults("cpu")
    ('black', False)
    """
    if device_type not in ("cuda", "cpu"):
        raise UnknownName("device with default lists", device_type, ("cuda", "cpu"))
    return {
        name: Place(group.kind, group.reason)
        for group in _GROUPS
        for name in f"{group.both} {group.cuda if device_type == 'cuda' else group.cpu}".split()
    }


def _default(name: str, device_type: str) -> Place:
    listed = defaults(device_type)
    for operator in (name, *_STANDS_WITH.get(name, ())):
        if operator in listed:
            return listed[operator]
    return UNLISTED


@functools.cache
def _functions() -> frozenset[str]:
    """Names of the functions that a mode of torch sees: what each calls itself, whichever way it is spelt.

    Less those that work in place, which torch casts as little: the result would not fit its storage.
    """
    found = {"hardsigmoid", "hardswish"}  # that table leaves them out; torch passes them to a mode all the same
    for functions in torch.overrides.get_overridable_functions().values():
        found |= {getattr(function, "__name__", "") for function in functions}
    return frozenset(name for name in found if name and not name.startswith("_") and not name.endswith("_"))


def canonical(name: str) -> str:
    """The one name of a function: "softmax" for "torch.nn.functional.softmax", "matmul" for "__matmul__".

    Raises UnknownName, with the nearest names, and OpListError for what is no string.

    >>> canonical("torch.linalg.norm"), canonical("Tensor.__matmul__"), canonical("F.softmax")
    ('linalg_norm', 'matmul', 'softmax')
    """
    return _spellings(name)[0]


def _spellings(name: str) -> tuple[str, ...]:
    """A function's one name, then the others under which torch passes it to a mode."""
    if not isinstance(name, str):
        raise OpListError(f"op lists take names of functions: {getattr(name, '__name__', name)!r} as a string")
    path = name.removeprefix("torch.").removeprefix("nn.functional.").removeprefix("functional.").removeprefix("F.")
    module, _, last = path.rpartition(".")
    if module in ("linalg", "fft", "special"):
        last = f"{module}_{last}"
    elif module not in ("", "Tensor"):
        raise UnknownName("function of torch", name, sorted(_functions()))
    if last.startswith("__"):  # a method of Tensor: x @ y is passed as Tensor.matmul
        last = _alias_of().get(last, last.strip("_"))
    last = _alias_of().get(last, last)
    if last not in _functions():
        raise UnknownName("function of torch", name, sorted(_functions()))
    return last, *(alias for alias, plain in _alias_of().items() if plain == last)


def _blind_spots(moves: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """(device type and outer function, warning) for each function that computes a moved one inside, unmoved."""
    moved = dict(moves)
    found = []
    for device_type in ("cuda", "cpu"):
        for outer, names in _WITHIN.items():
            whole = _default(outer, device_type)
            for name in names:
                stays = (_default(name, device_type) if whole is UNLISTED else whole).kind
                if moved.get(name, stays) != stays:
                    inside = f"{name!r} is {moved[name]} in these OpLists, but {outer} computes it inside, where it "
                    found.append((f"{device_type} {outer}", f"{inside}stays {stays}: list {outer!r} as well"))
    return tuple(found)


# What torch.compiler.assume_constant_result does, without importing Dynamo: lists can be built in a compiled function.
for _function in (_spellings, _blind_spots):
    _torch.constant_in_graphs(_function)


@functools.cache
def _alias_of() -> dict[str, str]:
    """Another name -> the one name."""
    known = _functions()
    special = {name: name.removeprefix("special_") for name in known if name.startswith("special_")}
    found = {alias: plain for alias, plain in special.items() if plain in known}
    return found | {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}


@dataclass(frozen=True, repr=False)
class OpLists:
    """Changes to torch's lists: functions put into, or moved to, another one.

    white: run in autocast's dtype.  black: run in FP32.  gray: run in the widest dtype among their inputs.
    Each an iterable of names as torch calls the functions, "softmax" or "torch.nn.functional.softmax"; a name holds
    for all spellings: torch.softmax, F.softmax, Tensor.softmax, and `@` for "matmul".
    A value: equal lists are equal, and hash alike.  Build it outside a compiled function.

    Raises UnknownName for a name that torch does not have, OpListError for a name in two of the lists.

    >>> lists = OpLists(black=["matmul"], white=["F.softmax"])
    >>> lists
    OpLists(white=['softmax'], black=['matmul'])
    >>> lists == OpLists(white=["softmax"], black=["torch.Tensor.__matmul__"])
    True
    >>> print(OpLists().where("layer_norm").reason)
    mean and variance are sums over a row, and squares over 255 overflow FP16
    """

    white: Iterable[str] = ()
    black: Iterable[str] = ()
    gray: Iterable[str] = ()
    places: dict[str, str] = field(init=False, compare=False)  # every spelling of a moved function -> its kind
    blind_spots: dict[str, str] = field(init=False, compare=False)  # "cuda einsum" -> a moved function in it stays

    def __post_init__(self):
        kinds: dict[str, str] = {}
        for kind in KINDS:
            given = getattr(self, kind)
            if isinstance(given, str):
                raise OpListError(f"OpLists({kind}=) takes a list of names: {kind}=[{given!r}]")
            spellings = {_spellings(name) for name in given}
            for spelt in spellings:
                if spelt[0] in kinds:
                    raise OpListError(
                        f"{spelt[0]!r} is in {kinds[spelt[0]]}= and in {kind}=: a function stands in one list, "
                        "take it out of the other"
                    )
            kinds.update({name: kind for spelt in spellings for name in spelt})
            object.__setattr__(self, kind, tuple(sorted([spelt[0] for spelt in spellings])))
        object.__setattr__(self, "places", kinds)
        object.__setattr__(self, "blind_spots", dict(_blind_spots(tuple(kinds.items()))))

    def where(self, name: str, device_type: str = "cuda") -> Place:
        """The list that a function is in on "cuda" or "cpu" after these changes, and the reason.

        Names of torch's own operators, such as "upsample_bilinear2d", are known too.  Raises UnknownName.

        >>> print(OpLists(white=["softmax"]).where("softmax").reason)
        moved by OpLists; torch: black (sums of exponentials: small terms vanish in 11 bits)
        """
        listed = defaults(device_type)
        known = name if name in listed else canonical(name)
        default = _default(known, device_type)
        if (kind := self.places.get(known)) is None:
            return default
        return Place(kind, f"moved by OpLists; torch: {default.kind} ({default.reason})")

    def __bool__(self) -> bool:
        """Whether anything was moved."""
        return bool(self.places)

    def __repr__(self) -> str:
        given = [f"{kind}={list(getattr(self, kind))}" for kind in KINDS if getattr(self, kind)]
        return f"OpLists({', '.join(given)})"


# No changes.  A frozen value, so it can be the default of a parameter.
UNCHANGED = OpLists()
