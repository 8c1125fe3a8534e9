"""Activations in registers: y = f(x), or f(gate) u(up); f and dy f' for every kind of the table below.

    relu       max(x, 0)                   dx = dy where x > 0
    srelu      max(x, 0)^2                 dx = 2 dy max(x, 0)
    gelu       x Phi(x)                    dx = dy (Phi(x) + x phi(x))
    gelu_tanh  x g, g = sigmoid(u)         dx = dy (g + x g (1 - g) u'(x)),  u = 2 sqrt(2 / pi) (x + 0.044715 x^3)
    sigmoid    g = sigmoid(x)              dx = dy g (1 - g)
    silu       x sigmoid(x)                s = 1 of the next line
    qgelu      x sigmoid(s x), s = 1.702   dx = dy g (1 + s x (1 - g)),  g = sigmoid(s x)
    clamped    qgelu(min(x, 7))            0 where x > 7;  u(up) = clamp(up, -7, 7) + 1, of slope 0 where |up| > 7

Elsewhere u(up) = up.  All of it in FP32.  f(0) = 0, or u(0) = 0 beside it: what lies beyond the edge of a tile stays 0.
A new kind is one row of GATED or one name in PLAIN; a new function is one branch of `activate` and one of `gradient`,
without which the kernels of its backward do not compile.
Twin: fp8engine/ops/reference/activations.py, which names the sources.
"""

import triton
import triton.language as tl

from fp8engine.kernels.constant import Constant

PLAIN = ("relu", "srelu", "gelu", "gelu_tanh", "qgelu", "silu")
GATED = {  # kind -> the function of its gate
    "reglu": "relu",
    "sreglu": "srelu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "qgeglu": "qgelu",
    "swiglu": "silu",
    "glu": "sigmoid",
    "clamped_swiglu": "clamped",
}
FUNCTIONS = dict(zip(PLAIN, PLAIN, strict=True)) | GATED
# Always the right factor: interpreted, a constant that is the left one gives a constant, no tensor.
INVERSE_SQRT_2 = Constant(0.7071067811865476)
INVERSE_SQRT_2_PI = Constant(0.3989422804014327)
TWICE_SQRT_2_OVER_PI = Constant(1.5957691216057308)
QUICK = Constant(1.702)
LIMIT = Constant(7.0)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """f(x) in FP32.  tanh by way of the sigmoid, (1 + tanh u) / 2 = sigmoid(2 u): the interpreter has no tanh."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)  # NaN stays, and -0
    elif ACTIVATION == "srelu":
        x = tl.where(x < 0, 0.0, x * x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * INVERSE_SQRT_2))
    elif ACTIVATION == "gelu_tanh":
        x = x * tl.sigmoid((x + 0.044715 * x * x * x) * TWICE_SQRT_2_OVER_PI)
    elif ACTIVATION == "qgelu":
        x = x * tl.sigmoid(x * QUICK)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "sigmoid":
        x = tl.sigmoid(x)
    elif ACTIVATION == "clamped":
        x = tl.where(x > LIMIT, LIMIT, x)
        x = x * tl.sigmoid(x * QUICK)
    else:
        tl.static_assert(ACTIVATION == "none", "`activate` has no branch for this function: write one")
    return x


@triton.jit
def gradient(dy, x, ACTIVATION: tl.constexpr):
    """dy * f'(x) in FP32."""
    if ACTIVATION == "relu":
        dx = tl.where(x <= 0, 0.0, dy)  # False for NaN, whose gradient passes, as in torch
    elif ACTIVATION == "srelu":
        dx = tl.where(x <= 0, 0.0, dy * (2.0 * x))
    elif ACTIVATION == "gelu":
        density = tl.exp(-0.5 * x * x) * INVERSE_SQRT_2_PI
        dx = dy * (0.5 * (1.0 + tl.erf(x * INVERSE_SQRT_2)) + x * density)
    elif ACTIVATION == "gelu_tanh":
        g = tl.sigmoid((x + 0.044715 * x * x * x) * TWICE_SQRT_2_OVER_PI)
        dx = dy * (g + x * g * (1.0 - g) * ((1.0 + 0.134145 * x * x) * TWICE_SQRT_2_OVER_PI))
    elif ACTIVATION == "sigmoid":
        g = tl.sigmoid(x)
        dx = dy * (g * (1.0 - g))
    elif ACTIVATION == "silu":
        g = tl.sigmoid(x)
        dx = dy * (g * (1.0 + x * (1.0 - g)))
    elif ACTIVATION == "qgelu" or ACTIVATION == "clamped":  # of clamped, what lies beyond its limit does not matter
        g = tl.sigmoid(x * QUICK)
        dx = dy * (g * (1.0 + x * QUICK * (1.0 - g)))
        if ACTIVATION == "clamped":
            dx = tl.where(x > LIMIT, 0.0, dx)
    return dx  # not defined, and so an error when it is compiled: this activation has no branch above


@triton.jit
def linear_part(up, ACTIVATION: tl.constexpr):
    """u(up), by which f(gate) is multiplied."""
    if ACTIVATION == "clamped":
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0  # NaN stays
    return up
