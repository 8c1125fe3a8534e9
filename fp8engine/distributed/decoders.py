"""fe.distributed.decoder_plan: how the layers of Hugging Face's Llama and Qwen are divided, tokens between them too.

embedding, masks, rotary positions   whole on every rank: transformers takes the length of the sequence from them
head                                 whole on every rank
first block                          each rank keeps its part of the tokens
norms, residuals                     of a rank's tokens
q k v, o; gate up, down              Colwise and Rowwise: tokens are gathered and scattered around them
norms of q and k                     of a rank's heads
last norm                            of a rank's tokens, then gathered, for the head and the loss
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fp8engine.convert.blocks import repeated_blocks
from fp8engine.convert.select import linear_layers, told_by_config
from fp8engine.distributed.styles import Colwise, Rowwise
from fp8engine.errors import ParallelError

TOKENS, HEADS = 1, 2  # dimensions of [batch, tokens, features] and of [batch, tokens, heads, features]
KNOWN = ("llama", "mistral", "qwen2", "qwen3")  # of a config's model_type: those that the tests run
NORMS = ("input_layernorm", "post_attention_layernorm")
FIRST = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
LAST = ("self_attn.o_proj", "mlp.down_proj")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")  # Qwen 3's


def decoder_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """The plan for `tensor_parallel` of a Hugging Face decoder: Llama, Mistral, Qwen 2, Qwen 3, with or without head.

    Tokens are divided between the layers (sequence parallelism).  Embedding and head stay whole on every rank.
    Entries may be added or replaced: it is a dict from names to styles.  A model under any recipe has the same plan,
    and `fe.convert(..., fuse=True)` too, whose norms then run by themselves.
    Raises ParallelError for any other model, with what it is.

    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    >>> model = Qwen3ForCausalLM(Qwen3Config(**size, head_dim=8, num_hidden_layers=2, vocab_size=64))
    >>> for name, style in decoder_plan(model).items():
    ...     print(name, style)
    model.embed_tokens Whole()
    model.layers.0 Enter(S(1))
    model.norm Normed(S(1), output_layouts=R, use_local_output=True)
    lm_head Whole()
    model.layers.*.input_layernorm Normed(S(1), output_layouts=S(1), use_local_output=False)
    model.layers.*.post_attention_layernorm Normed(S(1), output_layouts=S(1), use_local_output=False)
    model.layers.*.self_attn.q_proj Colwise(input_layouts=S(1), output_layouts=S(-1), use_local_output=True)
    model.layers.*.self_attn.k_proj Colwise(input_layouts=S(1), output_layouts=S(-1), use_local_output=True)
    model.layers.*.self_attn.v_proj Colwise(input_layouts=S(1), output_layouts=S(-1), use_local_output=True)
    model.layers.*.mlp.gate_proj Colwise(input_layouts=S(1), output_layouts=S(-1), use_local_output=True)
    model.layers.*.mlp.up_proj Colwise(input_layouts=S(1), output_layouts=S(-1), use_local_output=True)
    model.layers.*.self_attn.o_proj Rowwise(input_layouts=S(-1), output_layouts=S(1), use_local_output=True)
    model.layers.*.mlp.down_proj Rowwise(input_layouts=S(-1), output_layouts=S(1), use_local_output=True)
    model.layers.*.self_attn.q_norm Normed(S(2), output_layouts=S(2), use_local_output=True)
    model.layers.*.self_attn.k_norm Normed(S(2), output_layouts=S(2), use_local_output=True)
    """
    stack, block = _stack(model)
    decoder = stack.removesuffix("layers")
    whole = Whole()
    outside = [name for name, layer, _ in linear_layers(model) if type(layer) is nn.Linear]
    plan: dict[str, ParallelStyle] = {
        f"{decoder}embed_tokens": whole,
        f"{stack}.0": Enter(),
        f"{decoder}norm": Normed(Shard(TOKENS), output_layouts=Replicate(), use_local_output=True),
        **{name: whole for name in outside if not name.startswith(f"{stack}.")},
    }
    styles: dict[str, Any] = {
        **dict.fromkeys(NORMS, Normed(Shard(TOKENS))),
        **dict.fromkeys(FIRST, Colwise(input_layouts=Shard(TOKENS))),
        **dict.fromkeys(LAST, Rowwise(output_layouts=Shard(TOKENS))),
        **dict.fromkeys(HEAD_NORMS, Normed(Shard(HEADS), use_local_output=True)),
    }
    inside = {name for name, _ in block.named_modules()}
    plan |= {f"{stack}.*.{name}": style for name, style in styles.items() if name in inside}
    return plan


class Enter(ParallelStyle):
    """The first argument of a module, a tensor whole on every rank, is divided along its tokens; backward gathers."""

    def __repr__(self) -> str:
        return f"Enter({Shard(TOKENS)})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def divide(_: nn.Module, inputs: tuple) -> tuple:
            x, *others = inputs
            if x.shape[TOKENS] % device_mesh.size():
                raise ParallelError(
                    f"decoder_plan: sequences of {x.shape[TOKENS]} tokens are not divisible by {device_mesh.size()} "
                    "ranks: pad them"
                )
            mine = _from(x, device_mesh, Replicate()).redistribute(placements=[Shard(TOKENS)])
            return (mine.to_local(), *others)

        module.register_forward_pre_hook(divide)
        return module


class Normed(ParallelStyle):
    """A norm of this rank's part of a tensor, whose parameters' gradients are sums over ranks.

    layouts: of the tensor, plain or not.  output_layouts: of the result; None: as it came.  use_local_output: a plain
    tensor; else a DTensor, whose shape is the whole's, which transformers' attention reads before q, k and v gather it.
    """

    def __init__(self, layouts: Placement, *, output_layouts: Placement | None = None, use_local_output: bool = False):
        super().__init__()
        self.layouts, self.outputs, self.local = layouts, output_layouts or layouts, use_local_output
        self.made: dict[nn.Parameter, nn.Parameter] = {}

    def __repr__(self) -> str:
        return f"Normed({self.layouts}, output_layouts={self.outputs}, use_local_output={self.local})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layouts, outputs, local = self.layouts, self.outputs, self.local  # hooks that kept `self` would keep `made`

        def leave(_: nn.Module, inputs: tuple, y: DTensor) -> torch.Tensor:
            y = y.redistribute(placements=[outputs])
            return y.to_local() if local else y

        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in self.made:
                whole = distribute_tensor(parameter, device_mesh, [Replicate()])
                self.made[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module.register_parameter(name, self.made[parameter])
        module.register_forward_pre_hook(lambda _, inputs: (_from(inputs[0], device_mesh, layouts), *inputs[1:]))
        module.register_forward_hook(leave)
        return module


class Whole(Normed):
    """A layer that stays whole on every rank: its parameters become DTensors as those of all other layers are.

    Optimizers and clip_grad_norm_ take either plain tensors or DTensors, and no mixture.  Tied parameters stay one.
    """

    def __init__(self):
        super().__init__(Replicate(), use_local_output=True)

    def __repr__(self) -> str:
        return "Whole()"


def _from(x: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(x, mesh, [placement], run_check=False)


def _stack(model: nn.Module) -> tuple[str, nn.Module]:
    """The name of the stack of the decoder's blocks, and the first of them.  Raises ParallelError."""
    here = "decoder_plan"
    known = f"the plans of {', '.join(KNOWN)} are known; for others write one by hand, docs/distributed.md"
    kind = next((found for module in model.modules() if (found := told_by_config(module, "model_type"))), None)
    if kind is None:
        raise ParallelError(f"{here}: {type(model).__name__} is no model of transformers: {known}")
    names, blocks = {id(module): name for name, module in model.named_modules()}, repeated_blocks(model)
    stacks = {names[id(block)].rpartition(".")[0] for block in blocks}
    whole = all(all(name in dict(block.named_modules()) for name in (*NORMS, *FIRST, *LAST)) for block in blocks)
    if kind not in KNOWN or len(stacks) != 1 or not whole:
        raise ParallelError(f"{here}: {type(model).__name__} is of {kind}: {known}")
    return stacks.pop(), blocks[0]
