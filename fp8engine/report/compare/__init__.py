"""Comparison of a model with its converted copies on real text: `fp8engine compare`.

The model runs in FP32, then a copy of it under each recipe, on the same batches:

    loss      mean cross-entropy of the tokens to predict (language models), and its change
    top-1     share of these predictions, or of a classifier's answers, that stay the same
    cosine    of each text's embedding, the mean of its tokens' last hidden states, to that in FP32 (encoders)
    SQNR      10 log10( sum y^2 / sum (y' - y)^2 ) dB in FP64, padding left out; y in FP32, y' under the recipe

The first three are means over texts with their standard errors (scores.py).  The command line's first row is always
"bf16", the error that training and serving in 16 bits have already.

SQNR is taken of the model's output and of each linear layer, there twice: `sqnr_db` inside the model, where the input
already carries the errors of earlier layers, and `own_sqnr_db` of the layer called with the input that it has in FP32.
The layer with the lowest own SQNR is the one to keep in 16 bits: only its own casts lower that
number, while the first one falls with every layer on the way.  The picture has both for each transformer block.

`fe.amp.compare` compares two dtypes of one model without FP8, module by module.
"""

from fp8engine.report.compare.batches import BYTES, Tokens, batches, pieces
from fp8engine.report.compare.result import Comparison
from fp8engine.report.compare.run import compare_recipes, run_training_steps

__all__ = ["BYTES", "Comparison", "Tokens", "batches", "compare_recipes", "pieces", "run_training_steps"]
