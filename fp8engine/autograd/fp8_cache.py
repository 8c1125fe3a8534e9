"""Keys and values of earlier tokens in E4M3, half of the bytes of 16 bits, with a scale per head and block of tokens.

    s[b, h, i]    = 2^floor(log2(MAX / a)),  a = max |x[b, h, t, :]| over the tokens t of block i of `block` tokens
    code          = saturate(RNE(x * s))              x ≈ code / s, exact in BF16 and FP32: s is a power of two

Whole blocks, counted from the first token, are codes; the tokens after them, fewer than a block, stay in their own
dtype.  So what is stored is a function of the tokens, not of how many came at once.  A token is cast when its block is
complete, after the call that completes it: a call's own keys and values are seen as they came.

A NaN or Inf is NaN in its code; zeros stay zeros.  Source of the arithmetic: ops/reference/quantize.py, per row of a
matrix whose rows are the blocks.
"""

from __future__ import annotations

import torch

from fp8engine.autograd.attention import Cache
from fp8engine.errors import GradientError, ShapeError, StateError, UnsupportedDtype
from fp8engine.numerics.cast import Cast
from fp8engine.numerics.formats import E4M3, FLOATS
from fp8engine.ops import casts

BLOCK = 32  # measured: docs/serving.md
PER_BLOCK = Cast.parse("e4m3 1x-1 p2")


class Blocks:
    """Keys, or values, of one layer: [batch, heads, tokens, width] in FP32, BF16 or FP16.

    codes: E4M3 [batch, heads, blocks, block * width].  scale: FP32 [batch, heads, blocks, 1], x ≈ codes * scale.
    rest: the tokens after the last whole block, in their own dtype.  dropped: tokens let go at the front, whole blocks.

    >>> kept = Blocks(torch.empty(1, 2, 0, 4), block=16)
    >>> kept.append(torch.randn(1, 2, 40, 4)).shape
    torch.Size([1, 2, 40, 4])
    >>> kept.encode()
    >>> len(kept), kept.codes.shape, kept.rest.shape
    (40, torch.Size([1, 2, 2, 64]), torch.Size([1, 2, 8, 4]))
    """

    def __init__(self, like: torch.Tensor, block: int):
        """Empty, for tokens as those of `like`.  Raises UnsupportedDtype for another dtype."""
        if like.dtype not in FLOATS:
            raise UnsupportedDtype(f"FP8 cache: keys or values are {like.dtype}; want float32, bfloat16 or float16")
        batch, heads, _, width = like.shape
        self.block, self.dropped, self.of_graph = block, 0, False
        self.codes = like.new_empty(batch, heads, 0, block * width, dtype=E4M3.dtype)
        self.scale = like.new_empty(batch, heads, 0, 1, dtype=torch.float32)
        self.rest = like.new_empty(batch, heads, 0, width)

    def __getstate__(self) -> dict:
        return vars(self) | {"codes": _bytes(self.codes)}  # pickle by itself, without torch.save, takes no FP8 of torch

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, codes=state["codes"].view(E4M3.dtype))

    def __len__(self) -> int:
        """Tokens seen, dropped ones included."""
        return self.dropped + self.codes.shape[2] * self.block + self.rest.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes kept: codes, scales, and the tokens that are not cast yet."""
        return self.codes.nbytes + self.scale.nbytes + self.rest.nbytes

    def check(self, x: torch.Tensor) -> None:
        """Raise ShapeError for tokens of another batch, other heads, width or dtype than those kept; as `values`."""
        self._refuse_gradient()
        batch, heads, _, width = self.rest.shape
        if (*x.shape[:2], *x.shape[3:]) != (batch, heads, width) or x.dtype != self.rest.dtype:
            raise ShapeError(
                f"FP8 cache: {x.dtype} {list(x.shape)} after {self.rest.dtype} [{batch}, {heads}, T, {width}]; a cache "
                "serves one batch of one model: make another, or reset it"
            )

    def append(self, x: torch.Tensor) -> torch.Tensor:
        """Keep more tokens, in their own dtype until `encode`.  Returns all: `values`, then x as it came.

        Raises as `check` does.
        """
        self.check(x)
        found = torch.cat([self.values(), x], 2) if len(self) > self.dropped else x
        self.of_graph = self.of_graph or x.requires_grad
        self.rest = torch.cat([self.rest, x.detach()], 2)
        return found

    def encode(self) -> None:
        """Cast every whole block."""
        batch, heads, tokens, width = self.rest.shape
        if (whole := tokens // self.block) == 0:
            return
        rows = self.rest[:, :, : whole * self.block].reshape(-1, self.block * width)
        made, groups = casts.quantize(rows, PER_BLOCK), (batch, heads, whole)
        codes = torch.cat([_bytes(self.codes), _bytes(made.data).view(*groups, -1)], 2)
        self.codes, self.scale = codes.view(E4M3.dtype), torch.cat([self.scale, made.scale.view(*groups, 1)], 2)
        self.rest = self.rest[:, :, whole * self.block :].clone()  # not a view, which would keep all of it

    def values(self) -> torch.Tensor:
        """The tokens kept, [batch, heads, tokens, width], in their dtype.

        Raises GradientError while gradients are taken, if what was kept has one.
        """
        self._refuse_gradient()
        return torch.cat([self._decoded(), self.rest], 2)

    def _refuse_gradient(self) -> None:
        if self.of_graph and torch.is_grad_enabled():
            raise GradientError(
                "FP8 cache: the keys and values that it keeps have a gradient, which codes do not carry; call the "
                "model under torch.no_grad(), or train with a cache in 16 bits"
            )

    def _decoded(self, first: int = 0) -> torch.Tensor:
        """The values of the codes from block `first` on, [batch, heads, tokens, width]."""
        dtype, codes, scale = self.rest.dtype, self.codes[:, :, first:], self.scale[:, :, first:]
        exact = torch.float32 if dtype == torch.float16 else dtype  # a scale may be too small for FP16
        values = casts.decode(codes, exact).mul_(scale.to(exact)).to(dtype)
        return values.view(*codes.shape[:2], -1, self.rest.shape[3])

    def drop(self, before: int) -> None:
        """Let go of the whole blocks that lie before token `before`; tokens are counted from the first one seen."""
        blocks = max(before - self.dropped, 0) // self.block
        if blocks == 0:
            return
        self.dropped += blocks * self.block
        cast = min(blocks, self.codes.shape[2])
        self.codes, self.scale = self.codes[:, :, cast:].clone(), self.scale[:, :, cast:].clone()
        self.rest = self.rest[:, :, (blocks - cast) * self.block :].clone()

    def crop(self, tokens: int) -> None:
        """Take back the last tokens.  What is left of a block that was cast is cast once more when it is whole again.

        Raises StateError for more tokens than are kept.
        """
        if tokens > len(self) - self.dropped:
            raise StateError(
                f"FP8 cache: {tokens} tokens to take back, and it keeps {len(self) - self.dropped} of {len(self)}"
            )
        if tokens > self.rest.shape[2]:
            whole, left = divmod(len(self) - self.dropped - tokens, self.block)
            self.rest = self._decoded(whole)[:, :, :left].clone()
            self.codes, self.scale = self.codes[:, :, :whole].clone(), self.scale[:, :, :whole].clone()
        else:
            self.rest = self.rest[:, :, : self.rest.shape[2] - tokens].clone()

    def select(self, rows: torch.Tensor) -> None:
        """Rows of the batch, by indices or by a mask: beams in another order, or some of them."""
        rows = rows.to(self.rest.device)
        self.codes = _bytes(self.codes)[rows].view(E4M3.dtype)
        self.scale, self.rest = self.scale[rows], self.rest[rows]


class Fp8Cache(Cache):
    """A `Cache` that keeps keys and values in E4M3: `Blocks` of `block` tokens; for fe.Attention and TransformerLayer.

    append gives all keys and values in their own dtype, for the softmax: the bytes are saved between calls, and one
    layer at a time is in 16 bits.  It has no gradient to what it kept.
    Raises ShapeError for a block below 1 or for another batch than before, UnsupportedDtype for other dtypes than FP32,
    BF16 and FP16, GradientError for keys with a gradient after the first call.

    >>> cache = Fp8Cache(block=2)
    >>> k = torch.full((1, 2, 3, 4), 1.1)
    >>> [part.shape[2] for _ in range(2) for part in cache.append(k, k)]
    [3, 3, 6, 6]
    >>> cache.key[0, 0, :, 0]  # the next append sees three blocks in E4M3
    tensor([1.1250, 1.1250, 1.1250, 1.1250, 1.1250, 1.1250])
    """

    def __init__(self, block: int = BLOCK):
        self.block = checked(block)
        self._kept: tuple[Blocks, Blocks] | None = None
        self._context: tuple[Blocks, Blocks] | None = None
        self._packed = False

    def __len__(self) -> int:
        """Positions held."""
        return 0 if self._kept is None else len(self._kept[0])

    @property
    def key(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The keys as the next call will see them."""
        return None if self._kept is None else self._kept[0].values()

    @property
    def value(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The values as the next call will see them."""
        return None if self._kept is None else self._kept[1].values()

    @property
    def of_context(self) -> tuple[torch.Tensor, torch.Tensor] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Keys and values of cross attention's context as later calls see them, in the projections' shape."""
        if self._context is None:
            return None
        k, v = (part.values().transpose(1, 2).flatten(2) for part in self._context)
        return (k[0], v[0]) if self._packed else (k, v)

    @property
    def nbytes(self) -> int:
        """Bytes kept between calls, those of a context among them."""
        return sum(part.nbytes for pair in (self._kept, self._context) if pair for part in pair)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, the new ones last and as they are."""
        if self._kept is None:
            self._kept = Blocks(k, self.block), Blocks(v, self.block)
        for part, x in zip(self._kept, (k, v), strict=True):
            part.check(x)
        found = self._kept[0].append(k), self._kept[1].append(v)
        for part in self._kept:
            part.encode()
        return found

    def keep_context(self, k: torch.Tensor, v: torch.Tensor, width: int) -> None:
        """Keep keys and values [batch, S, heads * width] of a context, or [S, heads * width] of packed ones."""
        self._packed = k.dim() == 2
        k, v = (part[None] if self._packed else part for part in (k, v))
        k, v = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in (k, v))
        self._context = Blocks(k, self.block), Blocks(v, self.block)
        for part, x in zip(self._context, (k, v), strict=True):
            part.append(x)
            part.encode()


def checked(block: int) -> int:
    """The tokens of a block.  Raises ShapeError for fewer than one."""
    if block < 1:
        raise ShapeError(f"FP8 cache: a block of {block} tokens; want 1 or more")
    return block


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """The same memory: torch indexes and joins FP8 on some devices only."""
    return codes.view(torch.uint8)
