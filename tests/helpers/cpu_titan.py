"""torchtitan 0.3.0 on a CPU with gloo: what it asks of an accelerator, a tokenizer and a text, for its debug Llama.

torchtitan asks torch for the accelerator when it is imported, so `prepare` comes before its first import in a process.
"""

import json
import logging
import os
import types
from collections import defaultdict
from pathlib import Path

import torch

STEPS = 4
# Sequences of 256 tokens, two of them on each rank.
OPTIONS = (
    "--training.seq_len 256 --training.local_batch_size 2 --training.disable_cuda_graphs "
    "--parallelism.data_parallel_shard_degree 2 --parallelism.spmd_backend partial_dtensor --debug.seed 0"
)


def prepare(rank: int, ranks: int) -> None:
    """Tell torch that its accelerator is the CPU, with the functions of one that torch.cpu lacks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), TOKENIZERS_PARALLELISM="false")
    os.environ["WANDB_MODE"] = "disabled"
    torch._utils._get_available_device_type = lambda: "cpu"
    properties = types.SimpleNamespace(total_memory=1 << 30, name="cpu", major=0, minor=0, multi_processor_count=1)
    missing = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: properties,
        "memory_stats": lambda *_: defaultdict(int),
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "set_device": lambda *_: None,
    }
    for name, function in missing.items():
        setattr(torch.cpu, name, function)
    torch.autograd.set_multithreading_enabled(False)  # torchtitan's init_distributed does; here the group is there

    from torch.distributed.fsdp import FSDPModule

    divide = FSDPModule.set_gradient_divide_factor

    def by_sums(self, factor):  # the default asks for PREMUL_SUM, which gloo does not have
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = by_sums

    from torchtitan.distributed import utils
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.decoder import Decoder

    utils.set_pg_timeouts = lambda *_, **__: None  # wants NCCL's options
    Decoder.get_attention_masks = lambda *_, **__: None  # which torch.compile would make, half a minute for nothing
    FlexAttention.forward = _causal  # has no backward on a CPU
    logging.getLogger().setLevel(logging.WARNING)


def _causal(self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, enable_gqa=False, **_):
    """Causal attention with FlexAttention's arguments; document boundaries are ignored."""
    heads_first = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    options = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)


def assets(folder: Path) -> None:
    """A tokenizer of bytes and a text of a few thousand lines, where torchtitan's debug config looks for them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*symbols, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    place = folder / "tests" / "assets" / "tokenizer"
    place.mkdir(parents=True)
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    text = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
    pieces = [text[at : at + 2000] for at in range(0, len(text), 2000)]
    lines = "".join(json.dumps({"text": piece}) + "\n" for piece in pieces)
    data = folder / "tests" / "assets" / "c4_test"
    data.mkdir(parents=True)
    (data / "data.json").write_text(lines)


def train(config, options: str, dump: Path, inspect=None) -> dict:
    """Train a trainer's config with torchtitan's command line options; losses by step, as it logs them.

    inspect: called with the model after the last step; what it returns is under "seen".
    """
    import tyro
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config.manager import custom_registry

    arguments = [*OPTIONS.split(), "--dump_folder", str(dump), *options.split()]
    config = tyro.cli(type(config), args=arguments, default=config, registry=custom_registry)
    losses: dict[int, float] = {}
    log = MetricsProcessor.log
    MetricsProcessor.log = lambda self, step, loss, *rest, **more: losses.update({step: float(loss)})
    trainer = config.build()
    try:
        trainer.train()
        return {"losses": losses, "seen": inspect(trainer.model_parts[0]) if inspect else None}
    finally:
        MetricsProcessor.log = log
        trainer.close()
