"""fe.hf.Fp8Cache, a Cache of transformers that keeps keys and values in E4M3: half of BF16's bytes between steps.

    model.generate(**inputs, past_key_values=fe.hf.Fp8Cache(model.config))

A layer is a pair of `Blocks` (autograd/fp8_cache.py).  A sliding-window layer lets go of whole blocks that no later
query sees.  While transformers records the past (assisted generation), blocks are cast at the next `crop`, so tokens
that are taken back were never cast.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    get_layer_types_and_kwargs,
)

from fp8engine.autograd.fp8_cache import BLOCK, Blocks, checked
from fp8engine.errors import ConversionError, StateError

KEEPS_KEYS = ("full_attention", "sliding_attention", "chunked_attention")
KEEPS_NONE = ("conv", "linear_attention", "dummy")  # a state of fixed size, or nothing: transformers' own layers


class Fp8Layer(CacheLayerMixin):
    """Keys and values of one layer.  block: tokens of a scale.  sliding_window: how many tokens a query sees, or None.

    Raises as `Blocks` does; StateError for a `crop` to before what a sliding window has kept.
    """

    is_croppable = True

    def __init__(self, block: int = BLOCK, sliding_window: int | None = None):
        # Not the base's, which sets keys and values: here these are made when they are read.
        self.block, self.sliding_window = block, sliding_window
        self.is_sliding, self.record_past, self.is_initialized = sliding_window is not None, False, False
        self._kept: tuple[Blocks, ...] = ()

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys kept, [batch, heads, tokens, width], decoded; None before the first."""
        return self._kept[0].values() if self._kept else None

    @property
    def values(self) -> torch.Tensor | None:
        """The values kept, as `keys`."""
        return self._kept[1].values() if self._kept else None

    @property
    def nbytes(self) -> int:
        """Bytes kept between steps."""
        return sum(part.nbytes for part in self._kept)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Empty, for keys and values as these."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._kept = Blocks(key_states, self.block), Blocks(value_states, self.block)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Keep new keys and values; returns those a query may see, the new ones last and as they came."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        states = key_states, value_states
        for part, x in zip(self._kept, states, strict=True):
            part.check(x)
        found = tuple(part.append(x) for part, x in zip(self._kept, states, strict=True))
        if not self.record_past:
            self._settle()
        if self.sliding_window is not None:
            seen = self.sliding_window - 1 + key_states.shape[2]
            found = tuple(part[:, :, -seen:] for part in found)
        return found

    def _settle(self) -> None:
        """Let go of what is out of the window, and cast whole blocks."""
        for part in self._kept:
            if self.sliding_window is not None:
                part.drop(len(part) - self.sliding_window + 1)
            part.encode()

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return len(self._kept[0]) if self._kept else 0

    def get_max_length(self) -> int:
        """The window, or -1: no maximum."""
        return -1 if self.sliding_window is None else self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that the next call of `update` returns, position of the first)."""
        length = self.get_seq_length()
        first = 0 if self.sliding_window is None else max(length - self.sliding_window + 1, 0)
        return length - first + query_length, first

    def activate_past_recording(self) -> None:
        """Cast, and drop, at each `crop` instead of each `update`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back tokens; a negative number, as transformers has it."""
        if tokens_to_remove > 0:
            raise StateError(f"crop({tokens_to_remove}): want the number of tokens to take back, negative")
        for part in self._kept:
            after = len(part) + tokens_to_remove
            needed = 0 if self.sliding_window is None else max(after - self.sliding_window + 1, 0)
            if part.dropped > needed:
                raise StateError(
                    f"crop({tokens_to_remove}) of a sliding window that has let go of the tokens before {part.dropped} "
                    f"and then needs those from {needed} on: call activate_past_recording() before"
                )
        for part in self._kept:
            part.crop(-tokens_to_remove)
        self._settle()

    def reset(self) -> None:
        """Empty again, for any batch."""
        self._kept, self.is_initialized = (), False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows of the batch in another order (beam search)."""
        for part in self._kept:
            part.select(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch that many times."""
        for part in self._kept:
            rows = torch.arange(part.rest.shape[0], device=part.rest.device)
            part.select(rows.repeat_interleave(repeats))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(block={self.block}, {self.get_seq_length()} tokens, {self.nbytes} bytes)"


class Fp8Cache(DynamicCache):
    """A cache for `generate` and forward of any transformers model, in E4M3 with a scale per head and block of tokens.

    config: the model's; it says which layers have a sliding window, and without it all keys are kept.  block: tokens
    that share a scale; the last ones, fewer than a block, stay in the model's dtype.  For encoder-decoder models put
    two into an EncoderDecoderCache, for self and cross attention.
    `update` decodes one layer's keys and values for its attention: what is saved is what is kept between.
    Raises ConversionError for a model that caches something else beside keys and values, naming it; ShapeError and
    UnsupportedDtype as `Blocks`.

    >>> cache = Fp8Cache(block=16)
    >>> k = torch.randn(1, 2, 64, 8, dtype=torch.bfloat16)
    >>> seen = cache.update(k, k, layer_idx=0)
    >>> cache.get_seq_length(), cache.nbytes / (2 * k.nbytes)
    (64, 0.515625)
    """

    def __init__(self, config: Any = None, block: int = BLOCK):
        checked(block)
        if config is None:
            Cache.__init__(self, layer_class_to_replicate=partial(Fp8Layer, block))  # pyright: ignore[reportArgumentType] - it is called, no more
            return
        kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        if unknown := sorted(set(kinds) - {*KEEPS_KEYS, *KEEPS_NONE}):
            raise ConversionError(
                f"Fp8Cache: {config.model_type} has layers that cache something else beside keys and values: "
                f"{', '.join(unknown)}; take transformers' DynamicCache(config=config)"
            )
        layers: list[Any] = [
            Fp8Layer(block, **its) if kind in KEEPS_KEYS else DYNAMIC_LAYER_TYPE_MAPPING[kind](**its)
            for kind, its in zip(kinds, options, strict=True)
        ]
        Cache.__init__(self, layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values kept between steps."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, Fp8Layer))
