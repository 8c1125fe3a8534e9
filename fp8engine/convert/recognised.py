"""Description of a model: its repeated blocks, and the norms, MLPs and activations that the probe sees in them.

Nothing here imports transformers, and nothing is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from torch import nn

from fp8engine.convert.blocks import repeated_blocks
from fp8engine.convert.probe import Found, survey
from fp8engine.convert.select import linear_layers
from fp8engine.errors import ConversionError
from fp8engine.ops.reference import Norm


@dataclass(frozen=True)
class Description:
    """Result of `describe`.  found: what each module is, by name; nothing that is inside an MLP has an entry.

    blocks: the name of each repeated block, and its class's.  outside: names of linear layers in no block.
    """

    found: dict[str, Found]
    blocks: dict[str, str]
    outside: tuple[str, ...]

    def inside(self, block: str) -> dict[str, Found]:
        """What was found in a block, by name within it."""
        prefix = f"{block}." if block else ""
        return {name.removeprefix(prefix): what for name, what in self.found.items() if name.startswith(prefix)}

    def __str__(self) -> str:
        lines = []
        same = lambda name: (name.rpartition(".")[0], self.blocks[name], _told(self.inside(name)))  # noqa: E731
        for (_, kind, told), alike in groupby(self.blocks, same):
            first, *others = alike
            more = f" to {others[-1]}, {1 + len(others)} alike" if others else ""
            lines += [f"{first}{more}: {kind}", *(f"    {line}" for line in told)]
        within = tuple(f"{name}." for name in self.blocks)
        beside = {name: what for name, what in self.found.items() if not name.startswith(within)}
        lines += [f"outside blocks: {line}" for line in _told(beside)]
        lines += [f"linear layers outside blocks: {', '.join(self.outside)}"] if self.outside else []
        return "\n".join(lines)


def describe(model: nn.Module) -> Description:
    """The blocks of a model, and what the probe sees in them; the model is left as it is.

    What it sees, it knows by numbers (probe.py): no name matters.  Raises ConversionError for what is no nn.Module.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=2, vocab_size=64))
    >>> print(describe(model))
    model.layers.0 to model.layers.1, 2 alike: LlamaDecoderLayer
        mlp: down_proj(silu(gate_proj(x)) * up_proj(x))
        input_layernorm, post_attention_layernorm: rms norm, eps 1e-06
    outside blocks: model.norm: rms norm, eps 1e-06
    linear layers outside blocks: lm_head
    >>> describe(model).found["model.layers.0.mlp"].down
    'down_proj'
    """
    ConversionError.unless(model, nn.Module, "describe takes an nn.Module")
    names = {id(module): name for name, module in model.named_modules()}
    found = {names[id(block)]: type(block).__name__ for block in repeated_blocks(model) if block._modules}
    within = tuple(f"{name}." for name in found)
    outside = tuple(name for name, *_ in linear_layers(model) if not f"{name}.".startswith(within))
    return Description(survey(model), found, outside)


def _told(found: dict[str, Found]) -> tuple[str, ...]:
    """A line for each kind of thing, with the names of all that are of it."""
    lines: dict[str, list[str]] = {}
    for name, what in found.items():
        lines.setdefault(_text(what), []).append(name)
    return tuple(f"{', '.join(filter(None, names)) or 'itself'}: {what}" for what, names in lines.items())


def _text(what: Found) -> str:
    if not isinstance(what, Norm):
        return str(what)
    plus = ", multiplies by 1 + weight" if what.zero_centered else ""
    return f"{what.kind} norm, eps {what.eps:g}{plus}"
