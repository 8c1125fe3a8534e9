"""Short trainings whose every number depends on the engine alone: integers for weights and batches, no random normals.

Three models under every recipe with a name, and what there is beyond Linear.  record.py runs them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from support import converted
from torch import nn

import fp8engine as fe
from fp8engine.demo.model import GPT, SIZES, loss_of
from fp8engine.demo.precision import PLAIN, Precision
from fp8engine.numerics.recipe import RECIPES

STEPS, FEWER = 20, 5
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0, **EAGER}
VOCABULARY, WIDTH, INNER = 64, 64, 208  # INNER: one whole block of 128, and a part of one


@dataclass
class Run:
    """What one training leaves.  losses: as float.hex; gradients: a digest for each step; state: one of all slots."""

    losses: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    state: str | None = None
    decisions: list[str] = field(default_factory=list)


def digest(*parts: Any) -> str:
    """Of tensors' dtypes, shapes and bytes, and of other values as they print: 20 hexadecimal digits of SHA-256."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            part = part.new_empty(part.shape).copy_(part.detach())  # contiguous, and no odd stride of one element
            total.update(f"{part.dtype} {list(part.shape)} ".encode())
            total.update(part.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(f"{part} ".encode())
    return total.hexdigest()[:20]


def flat(value: Any) -> Iterator[Any]:
    """The leaves of dicts and lists, each key before what it holds."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield key
        if isinstance(each, dict | list | tuple):
            yield from flat(each)
        else:
            yield each


def integers(model: Any, seed: int = 0) -> Any:
    """Put integers / 128 times a power of two into every parameter: matrices about K^-1/2 wide, norms near 1.

    A third of a matrix's elements is up to 2^13 smaller: what scales per tensor, row and block round differently.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randint(-127, 128, parameter.shape, generator=generator).float() / 128
            if parameter.dim() > 1:
                reduced = min(parameter.shape[-2:])
                drawn *= 2.0 ** (1 - reduced.bit_length() // 2)
                smaller = torch.randint(-26, 14, parameter.shape, generator=generator).clamp_(min=0)
                drawn *= torch.tensor([2.0**-i for i in range(14)])[smaller]
            elif "norm" in name or "ln_" in name:
                drawn = drawn / 8 + ("bias" not in name)
            else:
                drawn /= 8
            parameter.copy_(drawn)
    return model


def tokens(step: int, vocabulary: int = VOCABULARY) -> Any:
    return torch.randint(0, vocabulary, (2, 32), generator=torch.Generator().manual_seed(1000 + step))


def numbers(step: int) -> Any:
    """[2, 16, WIDTH] integers / 64 of a step."""
    return torch.randint(-127, 128, (2, 16, WIDTH), generator=torch.Generator().manual_seed(2000 + step)).float() / 64


@dataclass
class Training:
    """One training: the model, the loss of a step, and what goes around them."""

    model: Any
    loss: Callable[[int], Any]
    steps: int = STEPS
    forward: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    whole: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    scaler: Any = None

    def run(self) -> Run:
        """Train; the gradients recorded are the unscaled ones."""
        found, parameters = Run(), list(self.model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=2.0**-4, momentum=0.5, foreach=False, fused=False)
        scaler = self.scaler or torch.amp.GradScaler("cpu", enabled=False)
        with fe.backend("reference"):
            for step in range(self.steps):
                with self.whole():
                    with self.forward():
                        loss = self.loss(step)
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                grads = ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
                found.losses.append(loss.item().hex())
                found.gradients.append(digest(*(part for pair in grads for part in pair)))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        saved = fe.scaling_state_dict(self.model)
        if saved["slots"]:
            found.state = digest(*flat(saved["slots"]))  # whatever else a resumed run needs: tests/auto/test_resumed.py
            decisions = fe.inspect(self.model).decisions
            found.decisions = [f"{d['step']} {d['slot']} {d['before']} -> {d['after']}: {d['why']}" for d in decisions]
        return found


def named(recipe: str) -> Any:
    """The recipe of a name; `auto` with an interval at which 20 steps hold several decisions."""
    return fe.auto(interval=4) if recipe == "auto" else recipe


def gpt(recipe: str, steps: int = STEPS) -> Training:
    """The demo's GPT, as the demo trains it: under autocast in 16 bits, converted in FP8."""
    precision = Precision(recipe, torch.device("cpu"))
    model = integers(GPT(replace(SIZES["tiny"], context=32)))
    model = model if recipe in PLAIN else converted(model, named(recipe))
    return Training(
        model, lambda step: loss_of(model, tokens(step, 256)), steps, precision.forward, precision.step,
        precision.scaler,
    )  # fmt: skip


def plain_llama(**options: Any) -> Any:
    """Two blocks; heads shared by queries."""
    import transformers

    size = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    config = transformers.LlamaConfig(**size, **HEADS, **options)
    return integers(transformers.LlamaForCausalLM(config)).train()


def training(model: Any, steps: int = STEPS) -> Training:
    return Training(model, lambda step: model(input_ids=tokens(step), labels=tokens(step)).loss, steps)


def llama(recipe: str, fuse: bool = False) -> Training:
    """A converted Llama.  fuse: norms and MLPs run with the layers that read them, which is fe.convert's default."""
    return training(converted(plain_llama(), named(recipe), fuse=fuse))


def gpt2(recipe: str, fuse: bool = False) -> Training:
    """A converted GPT-2: Conv1D layers, an output head tied to the embedding."""
    import transformers

    size = {"n_embd": WIDTH, "n_inner": INNER, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY}
    quiet = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0, **EAGER}
    config = transformers.GPT2Config(**size, **quiet)
    return training(converted(integers(transformers.GPT2LMHeadModel(config)).train(), named(recipe), fuse=fuse))


def checkpointed_llama(reentrant: bool, recipe: str, fuse: bool = False) -> Training:
    """Blocks computed again in the backward pass."""
    model = converted(plain_llama(use_cache=False), recipe, fuse=fuse)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return training(model, FEWER)


def outlier_llama(objective: str) -> Training:
    """Under `auto`, with a channel that needs more than a scale per tensor."""
    model = plain_llama()
    model.model.embed_tokens.weight.data[:, 5] *= 2.0**15
    return training(converted(model, fe.auto(interval=2, objective=objective), fuse=False), 12)


def chain(objective: str) -> Training:
    """Linear layers in a row under `auto`, which then stores their results in FP8."""

    def make() -> Any:
        model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        return converted(model, fe.auto(interval=2, objective=objective), example_inputs=numbers(0))

    return replace(made_by_hand(make), steps=12)


def mixtral(recipe: str, fuse: bool = False) -> Training:
    """Experts kept in 3-D parameters."""
    import transformers

    size = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**size, **HEADS, **experts)
    return training(converted(integers(transformers.MixtralForCausalLM(config)).train(), recipe, fuse=fuse), FEWER)


def made_by_hand(make: Callable[[], Any]) -> Training:
    """A module of `numbers`; the loss is the mean square of its result."""
    model = integers(make())
    return Training(model, lambda step: model(numbers(step).requires_grad_()).square().mean(), FEWER)


def blocks(recipe: Any, **options: Any) -> Training:
    """Two fe.TransformerLayers, with rotary positions and a gated MLP."""
    heads = fe.Heads(4, 2, theta=1e4, causal=True)
    like_llama = {"activation": "swiglu", "bias": False, "norm": "rms", "heads": heads, "recipe": recipe}
    make = lambda: fe.TransformerLayer(WIDTH, INNER, **{**like_llama, **options})  # noqa: E731 - one use
    return made_by_hand(lambda: torch.nn.Sequential(make(), make()))


def mlps(recipe: Any, **options: Any) -> Training:
    first = lambda: fe.LayerNormLinear(WIDTH, WIDTH, recipe=recipe)  # noqa: E731 - one use
    second = lambda: fe.LayerNormMLP(WIDTH, INNER, recipe=recipe, **options)  # noqa: E731 - one use
    return made_by_hand(lambda: torch.nn.Sequential(first(), second()))


def baseline() -> Training:
    """The FP16 baseline: fe.amp's autocast and loss scale on a plain Llama."""
    found = training(plain_llama(), FEWER)
    found.forward = lambda: fe.amp.autocast("cpu", dtype=torch.float16)
    found.scaler = fe.amp.GradScaler("cpu", growth_interval=2)
    return found


def more() -> dict[str, Callable[[], Training]]:
    found: dict[str, Callable[[], Training]] = {
        "fused_checkpointed_llama/delayed": lambda: checkpointed_llama(False, "delayed", fuse=True),
        "checkpointed_llama/delayed": lambda: checkpointed_llama(False, "delayed"),
        "reentrant_llama/delayed": lambda: checkpointed_llama(True, "delayed"),
        "outlier_llama/auto": lambda: outlier_llama("accuracy"),
        "outlier_llama_for_speed/auto": lambda: outlier_llama("speed"),
        "chain/auto": lambda: chain("accuracy"),
        "chain_for_speed/auto": lambda: chain("speed"),
        "mixtral/current": lambda: mixtral("current"),
        "mixtral/rowwise": lambda: mixtral("rowwise"),
        "fused_mixtral/delayed": lambda: mixtral("delayed", fuse=True),
        "baseline/fp16": baseline,
    }
    for recipe in ("current", "delayed", "rowwise", "blockwise", "auto"):
        found[f"fused_llama/{recipe}"] = lambda recipe=recipe: replace(llama(recipe, fuse=True), steps=FEWER)
        found[f"fused_gpt2/{recipe}"] = lambda recipe=recipe: replace(gpt2(recipe, fuse=True), steps=FEWER)
    for recipe in ("current", "delayed", "rowwise", "blockwise"):
        found[f"transformer_layer/{recipe}"] = lambda recipe=recipe: blocks(recipe)
        found[f"mlp/{recipe}"] = lambda recipe=recipe: mlps(recipe)
    found["transformer_layer_recomputed/delayed"] = lambda: blocks("delayed", recompute=True)
    found["transformer_layer_stored/delayed"] = lambda: blocks("delayed", store="fp8")
    found["transformer_layer_post/current"] = lambda: blocks("current", placement="post")
    found["mlp_stored/rowwise"] = lambda: mlps("rowwise", store="fp8")
    return found


def groups() -> dict[str, dict[str, Callable[[], Training]]]:
    models = {"gpt": {"gpt": gpt}, "transformers": {"llama": llama, "gpt2": gpt2}}
    found = {
        group: {
            f"{model}/{recipe}": lambda make=make, recipe=recipe: make(recipe)
            for model, make in some.items()
            for recipe in RECIPES
            if model == "gpt" or recipe != "fp32"  # of an FP32 model fe.convert refuses "fp32": nothing to convert
        }
        for group, some in models.items()
    }
    bf16 = {f"gpt_in_bf16/{r}": lambda r=r: gpt(r, FEWER) for r in ("current", "delayed", "rowwise", "blockwise")}
    return {**found, "more": more(), "bf16_products": bf16}
