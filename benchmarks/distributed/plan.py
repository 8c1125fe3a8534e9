"""Planned bytes against those of real ranks, for a small language model whose sizes divide by nothing."""

import warnings

import torch
from torch import nn

from benchmarks.distributed.processes import run
from fp8engine.distributed import plan

RANKS, IDS = 4, (2, 24)
RECIPES = ("rowwise", "current", "blockwise", "delayed")
WIDTH, HIDDEN, WORDS, BLOCKS = 129, 333, 211, 5


class Block(nn.Module):
    """A residual MLP with a norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, equal blocks, head: token ids in, logits out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.lm_head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def real_step(rank: int, ranks: int, recipes: list[str | None], ids: tuple[int, int]) -> dict:
    """Of each recipe, what one rank sent and held in a step with other processes."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import fp8engine as fe
    from fp8engine.distributed.step import Saved
    from fp8engine.distributed.traffic import Traffic

    warnings.simplefilter("ignore")
    found = {}
    for recipe in recipes:
        torch.manual_seed(0)
        model = Model()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
        if recipe is None:
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        else:
            fe.distributed.fsdp(fe.convert(model, recipe), mesh=mesh, mp_policy=policy)
        saved = Saved()
        with Traffic() as traffic:
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
                loss = model(torch.randint(WORDS, ids)).float().square().mean()
            activations = saved.bytes(less=model.parameters())
            loss.backward()
        shards = [p.to_local() for p in model.parameters()]
        gradients = [p.grad.to_local() for p in model.parameters()]
        found[recipe] = {
            "traffic": traffic.to_dict(),
            "parameters": sum(p.nbytes for p in shards),
            "gradients": sum(p.nbytes for p in gradients),
            "saved activations": activations,
        }
    return found


def gathered(traffic: dict) -> int:
    """Bytes of the all-gathers."""
    return sum(sent["bytes"] for kind, sent in traffic.items() if kind.startswith("all-gather"))


def rows() -> list[dict]:
    """One row a recipe: planned and real bytes of four ranks, equal or not."""
    real = run(real_step, RANKS, [None, *RECIPES], IDS)[0]
    found = []
    for recipe in RECIPES:
        traffic = plan(Model(), RANKS, IDS[0] * IDS[1], recipe, sequence=IDS[1]).to_dict()["traffic"]
        kinds = {kind: (sent["bytes"], sent["calls"]) for kind, sent in traffic["FP8 gather"].items()}
        sent = {kind: (each["bytes"], each["calls"]) for kind, each in real[recipe]["traffic"].items()}
        share = gathered(traffic["FP8 gather"]) / gathered(traffic["16 bits"])
        found.append(_row(recipe, RANKS, kinds == sent, "bytes and calls of real ranks", share))
    return found


def _row(recipe: str, ranks: int, equal: bool | None, against: str, share: float) -> dict:
    return {
        "part": "plan",
        "recipe": recipe,
        "ranks": ranks,
        "option": "",
        "equal": equal,
        "against": against,
        "bytes_share": share,
        "error": "",
        "note": "all-gathers, embedding and head included",
    }
