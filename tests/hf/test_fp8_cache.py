"""fe.hf.Fp8Cache under generate(): greedy, beams, assisted, windows, encoder-decoder, converted models."""

import copy
from typing import Any

import pytest
import torch
import transformers
from hf_families import FAMILIES, MORE
from support import converted, sqnr
from tiny_models import gpt2, tokens
from tiny_models import llama as tiny_llama
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import fp8engine as fe
from fp8engine.errors import ConversionError, StateError
from fp8engine.nn import hf_cache

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}

Fp8Layer: Any = hf_cache.Fp8Layer


def llama() -> Any:
    return tiny_llama().eval()


def mistral() -> Any:
    return FAMILIES["mistral"].build(sliding_window=6)


def logits_of(model, ids, cache, steps):
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(steps, 1)], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [gpt2, llama, mistral])
def test_decoding_is_the_16_bit_caches_within_the_rounding_of_e4m3(make, dtype: torch.dtype):
    model, ids = make().eval().to(dtype), tokens(2, 24)
    wanted, found = (
        logits_of(model, ids, made(config=model.config), [10, *[1] * 14]).float()
        for made in (DynamicCache, lambda config: fe.hf.Fp8Cache(config, block=4))
    )
    assert torch.equal(wanted[:, :10], found[:, :10])
    # Keys and values have 28.9 dB at worst (2^-4 / sqrt(3)); the residual, which is not rounded, carries the rest.
    assert 28 < sqnr(wanted[:, 10:], found[:, 10:]) < 90


@pytest.mark.parametrize("steps", [[24], [5, 19], [20, 4], [9, 1, 8, 6]], ids=str)
def test_a_window_is_right_in_any_steps(steps: list[int]):
    """Blocks of 32 tokens are never whole here, so that nothing is cast and the results are DynamicCache's."""
    model, ids = mistral(), tokens(2, 24)
    whole = logits_of(model, ids, DynamicCache(config=model.config), [24])
    found = logits_of(model, ids, fe.hf.Fp8Cache(model.config, block=32), steps)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)  # FP32 sums in another order


@pytest.mark.parametrize("block", [1, 4])
def test_a_window_keeps_whole_blocks_that_can_still_be_seen(block: int):
    model, ids = mistral(), tokens(2, 40)
    cache: Any = fe.hf.Fp8Cache(model.config, block)
    logits_of(model, ids, cache, [30, *[1] * 10])
    assert cache.get_seq_length() == 40
    assert [layer.keys.shape[2] for layer in cache.layers] == [5 + (35 % block)] * 2


def test_how_the_tokens_came_is_not_stored():
    model, ids = llama(), tokens(2, 24)
    k = torch.randn(2, 2, 24, 8)
    whole, parts = Fp8Layer(4), Fp8Layer(4)
    whole.update(k, k)
    for part in k.split([3, 1, 15, 5], 2):
        parts.update(part, part)
    assert torch.equal(whole.keys, parts.keys)
    again = fe.hf.Fp8Cache(model.config, 4)
    first = model.generate(ids[:, :8], past_key_values=again, **GREEDY)
    again.reset()
    assert torch.equal(model.generate(ids[:, :8], past_key_values=again, **GREEDY), first)


@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_greedy_beams_and_several_answers(recipe: str | None):
    """Also of a converted model.  In blocks of 64 nothing is cast; in blocks of 4 it runs."""
    model, ids = llama(), tokens(2, 8)
    model = converted(model, recipe) if recipe else model
    for options in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        found = model.generate(ids, past_key_values=fe.hf.Fp8Cache(model.config, 64), **GREEDY, **options)
        assert torch.equal(found, model.generate(ids, **GREEDY, **options))
        small = fe.hf.Fp8Cache(model.config, 4)
        assert model.generate(ids, past_key_values=small, **GREEDY, **options).shape == found.shape
        assert small.get_seq_length() == 19


@pytest.mark.parametrize("make", [llama, mistral])
def test_assisted_generation(make):
    """In blocks of 64 nothing is cast, so that every token that was rejected has to be gone; in blocks of 4 it runs."""
    model, ids = make().eval(), tokens(1, 6).repeat(1, 3)
    greedy = model.generate(ids, **GREEDY)
    for block in (64, 4):
        cache = fe.hf.Fp8Cache(model.config, block)
        found = model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=3, **GREEDY)
        assert found.shape == greedy.shape
        assert block == 4 or torch.equal(found, greedy)
        assert cache.get_seq_length() == found.shape[1] - 1


def test_tokens_taken_back_while_recording_leave_no_trace():
    k = torch.randn(1, 2, 23, 8)
    for window in (None, 6):
        one, other = Fp8Layer(4, window), Fp8Layer(4, window)
        one.activate_past_recording()
        one.update(k[:, :, :20], k[:, :, :20])
        one.crop(0)
        wrong = torch.randn(1, 2, 7, 8)
        one.update(wrong, wrong)
        one.crop(-7)
        one.update(k[:, :, 20:], k[:, :, 20:])
        one.crop(0)
        other.update(k, k)
        assert torch.equal(one.keys, other.keys)
        assert one.get_mask_sizes(2) == other.get_mask_sizes(2)
    with pytest.raises(StateError, match="activate_past_recording"):
        other.crop(-20)


def test_an_encoder_decoder_takes_two():
    model, ids = MORE["bart"].build(), tokens(2, 20)
    both: Any = EncoderDecoderCache(*(fe.hf.Fp8Cache(block=4) for _ in range(2)))
    wanted = model.generate(ids, **GREEDY, output_logits=True, return_dict_in_generate=True)
    found = model.generate(ids, past_key_values=both, **GREEDY, output_logits=True, return_dict_in_generate=True)
    assert torch.equal(found.logits[0], wanted.logits[0])
    assert sqnr(wanted.logits[1], found.logits[1]) > 28
    assert both.cross_attention_cache.layers[0].get_seq_length() == 20
    assert both.cross_attention_cache.nbytes < 0.6 * 2 * 2 * 2 * 20 * 32 * 2


def test_rows_are_chosen_and_repeated():
    k = torch.randn(3, 2, 10, 8)
    layer = Fp8Layer(4)
    layer.update(k, k)
    values = layer.keys
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.keys, values.repeat_interleave(2, 0))
    layer.batch_select_indices(torch.tensor([4, 0]))
    assert torch.equal(layer.keys, values[[2, 0]])


def test_a_prompt_is_reused_from_a_copy():
    model, ids = llama(), tokens(1, 20)
    prompt = fe.hf.Fp8Cache(model.config, 4)
    logits_of(model, ids[:, :-1], prompt, [19])
    once, twice = (model.generate(ids, past_key_values=copy.deepcopy(prompt), **GREEDY) for _ in range(2))
    assert torch.equal(once, twice)
    assert prompt.get_seq_length() == 19


def test_layers_that_cache_something_else_are_refused_by_name():
    config = transformers.LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "indexed_attention"]
    with pytest.raises(ConversionError, match="indexed_attention"):
        fe.hf.Fp8Cache(config)
    config.layer_types = ["full_attention", "linear_attention"]
    assert len(fe.hf.Fp8Cache(config)) == 2
