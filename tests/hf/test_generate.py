"""generate() of converted models: with its cache and without, greedy, sampled and by beams.

A scale per row (rowwise, blockwise) is a token's own: the cache changes nothing but the order of FP32 sums.  A scale
per tensor comes from all the tokens of one forward, and with a cache that is one token: another rounding of the same
values, so both are as near to fp32 as tests/hf/test_families.py says, and to each other within twice that noise.
"""

import math
from typing import Any

import pytest
import torch
from hf_families import FAMILIES, Family
from support import converted, sqnr

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
GENERATES = {name: family for name, family in FAMILIES.items() if family.generates}
language_models = pytest.mark.parametrize("family", GENERATES.values(), ids=GENERATES)
NEW = 5


def prompt(family: Family) -> dict[str, torch.Tensor]:
    batch = family.batch(rows=2)
    return {key: batch[key] for key in ("input_ids", "input_features") if key in batch}


def generate(model: Any, start: dict, **options: Any) -> Any:
    return model.generate(**start, max_new_tokens=NEW, min_new_tokens=NEW, **{"do_sample": False, **options})


@pytest.mark.few(20)
@pytest.mark.parametrize("recipe", ["rowwise", "current", "delayed"])
@language_models
def test_the_cache_changes_no_more_than_its_rounding(family: Family, recipe: str):
    model = converted(family.build_smooth(), recipe)
    if recipe == "delayed":
        model(**family.batch()).loss.backward()
    start = prompt(family)
    found = generate(model, start, output_logits=True, return_dict_in_generate=True)
    cached = torch.stack(found.logits, 1)
    with torch.no_grad():
        if family.kind == "causal":
            whole = model(input_ids=found.sequences).logits[:, -NEW - 1 : -1]
        else:
            whole = model(**start, decoder_input_ids=found.sequences).logits[:, -NEW - 1 : -1]
    assert cached.shape == whole.shape
    if recipe == "rowwise":
        # FP32 sums in another order, and a value at a rounding boundary that falls to the other side.
        assert sqnr(whole, cached) > 40
        uncached = generate(model, start, use_cache=False)
        assert torch.equal(uncached, found.sequences[:, -uncached.shape[1] :])  # Whisper leaves out the first token
    else:
        assert sqnr(whole, cached) > 28 - 10 * math.log10(2 * family.depth) - 3
