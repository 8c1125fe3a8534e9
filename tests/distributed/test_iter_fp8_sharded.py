"""fe.hf.iter_fp8 of a model under FSDP2 on two ranks: the tensors of the whole model's export, a gather at a time."""

import shutil
from typing import Any, NamedTuple

import pytest
import tiny_models
import torch
import torch.distributed as dist
from ranks import holds_on_every_rank, named, work
from safetensors.torch import load_file
from support import converted
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8engine as fe
from benchmarks.distributed.processes import run
from fp8engine.autograd import products
from fp8engine.distributed.traffic import Traffic

pytestmark = pytest.mark.slow

# Two ranks share 65 rows unevenly, as 33 and 32.  The first tensor is the tied embedding.
SIZE = {"vocab_size": 65, "intermediate_size": 65, "tie_word_embeddings": True, "num_hidden_layers": 1}


def llama() -> Any:
    """With two parameters of one number each, of which the second rank holds nothing."""
    model: Any = tiny_models.llama(**SIZE)
    model.model.norm.one, model.model.layers[0].one = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    return model


def sharded(recipe: Any, rank: int, **options: Any) -> Any:
    """A model after some steps on each rank's own tokens, its blocks gathered as codes."""
    torch.manual_seed(0)
    model = converted(llama(), fe.auto(interval=1) if recipe == "auto" else recipe)
    fe.distributed.fsdp(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(rank)
    for _ in range(5 if recipe == "auto" else 2):
        tiny_models.loss_of(model, tiny_models.tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def whole_of(model: Any, dtype: torch.dtype) -> Any:
    """The same weights under the same recipes, which for auto are those that it has decided, in a model of one rank."""
    recipes = {name: layer.numerics.recipe for name, layer in model.named_modules() if hasattr(layer, "numerics")}
    whole = converted(llama().to(dtype), "current", overrides=recipes)
    whole.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    return whole


def forward_weights(model: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The weight operand of each layer's forward: values on the FP8 grid in FP32, and their scale."""
    seen, product = {}, products.product

    def watched(use, a, b, bias, out, matmul):
        seen[use.numerics.name] = (b.data.float(), b.scale.clone())
        return product(use, a, b, bias, out, matmul)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(products, "product", watched)
        model(tiny_models.tokens())
    return seen


def bits(tensor: torch.Tensor) -> tuple:
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).tolist()


class Case(NamedTuple):
    """A recipe and options of fe.distributed.fsdp: shards give what the whole model exports and its forward reads."""

    recipe: Any
    options: dict[str, Any] | None = None

    def __call__(self, rank: int, folder: str) -> None:
        model, ids = sharded(self.recipe, rank, **(self.options or {})), torch.arange(16).reshape(2, 8)
        policy = (self.options or {}).get("mp_policy")
        whole = whole_of(model, policy.param_dtype if policy else torch.float32)
        with torch.no_grad():
            before = model(ids).logits
        given = {name: bits(tensor) for name, tensor in fe.hf.iter_fp8(model)}
        if rank == 0:  # transformers writes nothing on other ranks
            shutil.rmtree(f"{folder}/case", ignore_errors=True)
            fe.hf.export(whole, f"{folder}/case")
        dist.barrier()
        assert given == {name: bits(t) for name, t in load_file(f"{folder}/case/model.safetensors").items()}
        dist.barrier()  # before another case writes there
        assert sum("float8" in kind for kind, _, _ in given.values()) == 7
        seen, wrong = forward_weights(model), 0
        for name, tensor in fe.hf.iter_fp8(model, layout="fp8engine"):
            layer, _, kind = name.rpartition(".")
            if layer in seen and kind == "weight":
                wrong += int((tensor.float().view(torch.int32) != seen[layer][0].view(torch.int32)).sum())
            elif layer in seen:
                wrong += int((tensor.flatten() != seen[layer][1].flatten()).sum())
        assert (len(seen), wrong) == (7, 0), "codes and scales are those that the forward multiplied"
        with torch.no_grad():
            assert torch.equal(before, model(ids).logits), "the next forward must gather as before"


def how_the_weights_are_divided_changes_nothing(rank: int, folder: str) -> None:
    """By fully_shard alone, or over their features."""
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    columns = [f"{attention}{name}_proj" for name in "qkv"] + [f"{mlp}{name}_proj" for name in ("gate", "up")]
    rows = [f"{attention}o_proj", f"{mlp}down_proj"]
    plan = dict.fromkeys(columns, fe.distributed.Colwise()) | dict.fromkeys(rows, fe.distributed.Rowwise())
    mesh = dist.init_device_mesh("cpu", (2,))
    for divide in (
        lambda model: fully_shard(model, mesh=mesh),
        lambda model: fe.distributed.tensor_parallel(model, mesh, plan),
    ):
        torch.manual_seed(0)  # fully_shard divides what each rank has
        model = converted(tiny_models.llama(num_key_value_heads=2, num_hidden_layers=1), "current")
        before = {name: bits(tensor) for name, tensor in fe.hf.iter_fp8(model)}
        divide(model)
        assert before == {name: bits(tensor) for name, tensor in fe.hf.iter_fp8(model)}


def each_tensor_is_gathered_when_it_comes(rank: int, folder: str) -> None:
    model = sharded("rowwise", rank)
    with Traffic() as first:
        pairs = fe.hf.iter_fp8(model)
        name, _ = next(pairs)
    with Traffic() as others:
        rest = len(list(pairs))
    assert name == "model.embed_tokens.weight"
    assert first.total() == 33 * 32 * 4, "a rank's rows of the embedding, padded, in FP32"
    assert sum(others.calls.values()) == 7 + 3 + 2, "a gather for each parameter, none for a scale or the tied head"
    assert rest == 2 * 7 + 3 + 2


PARTS: dict[str, Any] = {
    "current": Case("current"),
    "rowwise": Case("rowwise"),
    "rowwise_exact": Case(fe.rowwise(power_of_2=False)),
    "blockwise": Case("blockwise"),
    "auto": Case("auto"),
    "left whole by a forward": Case("rowwise", {"reshard_after_forward": False}),
    "bf16": Case("current", {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
} | named(how_the_weights_are_divided_changes_nothing, each_tensor_is_gathered_when_it_comes)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(work, 2, PARTS, str(tmp_path_factory.mktemp("exports")))


@pytest.mark.parametrize("part", PARTS)
def test_on_every_rank(part: str, found: list[dict[str, str]]):
    holds_on_every_rank(part, found)
