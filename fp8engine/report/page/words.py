"""Words of the page with their meaning, in the sentences of docs/glossary.md; shown on hover, and listed at its end."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

WORDS = {
    "amax": "The largest finite magnitude of a tensor, or of a group of its elements.",
    "decision": "One change of a slot's format, with its step and the numbers that caused it.",
    "early warning": "A message that amax/rms of a slot has grown by a factor of four, raised before anything "
    "saturates.",
    "emulated": "FP8 values multiplied without FP8 Tensor Cores, in BF16 or FP32 instructions.",
    "flushed": "An element that is not zero is so small under the scale that its code is zero.",
    "granularity": "The elements that share one scale: the whole tensor, a row, a column or a block.",
    "outlier": "An element, row or channel far larger than the rest of its tensor.",
    "recipe": "The casts of a layer's operands and the rules of its three matmuls.",
    "rms": "The root of the mean square of a tensor's elements.",
    "saturated": "An element larger than the format's largest number under the scale is stored as that largest number.",
    "scale": "The FP32 number that turns FP8 codes back into values: x ≈ q · scale.",
    "slot": "One tensor of one layer, as the engine keeps account of it.",
    "SQNR": "Signal to quantisation noise ratio in decibels: 10 log10 of the sum of squares of the exact values over "
    "that of the errors.",
}
FOUND = re.compile(rf"\b({'|'.join(WORDS)})(?=s?\b)")


def explained(text: str) -> Markup:
    """Text as HTML whose known words say on hover what they mean.

    >>> print(explained("amax < 3"))
    <abbr title="The largest finite magnitude of a tensor, or of a group of its elements.">amax</abbr> &lt; 3
    """
    word = Markup('<abbr title="{}">{}</abbr>')
    return Markup(FOUND.sub(lambda found: word.format(WORDS[found[1]], found[1]), escape(text)))
