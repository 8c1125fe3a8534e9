"""The type of a recipe's name: an editor proposes those that there are, and a type checker takes any text."""

from typing import Literal

KnownRecipe = Literal[
    "auto", "current", "delayed", "rowwise", "rowwise_gw_hp", "blockwise", "mxfp8", "bf16", "fp16", "fp32"
]
RecipeName = KnownRecipe | str
