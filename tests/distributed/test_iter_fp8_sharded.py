"""fe.hf.iter_fp8 of a model under FSDP2 on two ranks: the tensors of the whole model's export, a gather at a time."""

from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
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
CASES = {
    "current": ("current", {}),
    "rowwise": ("rowwise", {}),
    "rowwise_exact": (fe.rowwise(power_of_2=False), {}),
    "blockwise": ("blockwise", {}),
    "auto": ("auto", {}),
    "left whole by a forward": ("rowwise", {"reshard_after_forward": False}),
    "bf16": ("current", {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
}


def llama() -> Any:
    """With two parameters of one number each, of which the second rank holds nothing."""
    model: Any = tiny_models.llama(**SIZE)
    model.model.norm.one, model.model.layers[0].one = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    return model


def sharded(recipe: Any, options: dict, rank: int) -> Any:
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
    """dtype, shape and bytes."""
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).tolist()


def codes_that_differ(model: Any) -> tuple[int, int]:
    """(layers that a forward ran, codes and scales that are not those that it multiplied)."""
    seen, wrong = forward_weights(model), 0
    for name, tensor in fe.hf.iter_fp8(model, layout="fp8engine"):
        layer, _, kind = name.rpartition(".")
        if layer in seen and kind == "weight":
            wrong += int((tensor.float().view(torch.int32) != seen[layer][0].view(torch.int32)).sum())
        elif layer in seen:
            wrong += int((tensor.flatten() != seen[layer][1].flatten()).sum())
    return len(seen), wrong


def work(rank: int, ranks: int, folder: str) -> dict:
    found = {}
    ids = torch.arange(16).reshape(2, 8)
    for name, (recipe, options) in CASES.items():
        model = sharded(recipe, options, rank)
        policy = options.get("mp_policy")
        whole = whole_of(model, policy.param_dtype if policy else torch.float32)
        with torch.no_grad():
            before = model(ids).logits
        given = {n: bits(t) for n, t in fe.hf.iter_fp8(model)}
        if rank == 0:  # transformers writes nothing on other ranks
            fe.hf.export(whole, f"{folder}/{name}")
        dist.barrier()
        written = {n: bits(t) for n, t in load_file(f"{folder}/{name}/model.safetensors").items()}
        layers, wrong = codes_that_differ(model)
        with torch.no_grad():
            undisturbed = torch.equal(before, model(ids).logits)
        different = [n for n in written if given.get(n) != written[n]] + [n for n in given if n not in written]
        fp8 = sum("float8" in kind for kind, _, _ in given.values())
        found[name] = {"fp8": fp8, "different": different, "layers": layers, "wrong": wrong, "undisturbed": undisturbed}
    return found | {"gathers": gathers(rank), "others": other_shards()}


def other_shards() -> dict[str, list[str]]:
    """Names whose tensors change when a model is divided by fully_shard alone, or over its features."""
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    columns = [f"{attention}{name}_proj" for name in "qkv"] + [f"{mlp}{name}_proj" for name in ("gate", "up")]
    rows = [f"{attention}o_proj", f"{mlp}down_proj"]
    plan = dict.fromkeys(columns, fe.distributed.Colwise()) | dict.fromkeys(rows, fe.distributed.Rowwise())
    mesh, found = dist.init_device_mesh("cpu", (2,)), {}
    for way, divide in {
        "fully_shard": lambda model: fully_shard(model, mesh=mesh),
        "tensor parallel": lambda model: fe.distributed.tensor_parallel(model, mesh, plan),
    }.items():
        torch.manual_seed(0)  # fully_shard divides what each rank has
        model = converted(tiny_models.llama(num_key_value_heads=2, num_hidden_layers=1), "current")
        before = {name: bits(tensor) for name, tensor in fe.hf.iter_fp8(model)}
        divide(model)
        after = {name: bits(tensor) for name, tensor in fe.hf.iter_fp8(model)}
        found[way] = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return found


def gathers(rank: int) -> dict:
    """Collectives and their bytes until the first tensor is there, and until the last one is."""
    model = sharded("rowwise", {}, rank)
    with Traffic() as first:
        pairs = fe.hf.iter_fp8(model)
        name, _ = next(pairs)
    with Traffic() as others:
        rest = len(list(pairs))
    return {"first": name, "bytes": first.total(), "calls": sum(others.calls.values()), "rest": rest}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What `work` returns, on each of two ranks."""
    return run(work, 2, str(tmp_path_factory.mktemp("exports")))


@pytest.mark.few(4)
@pytest.mark.parametrize("case", CASES)
def test_shards_give_what_the_whole_model_exports_and_the_gathered_forward_multiplies(case: str, found: list[dict]):
    for rank in found:
        assert rank[case]["different"] == []
        assert rank[case]["fp8"] == 7
        assert rank[case]["undisturbed"], "the next forward must gather as before"
        assert (rank[case]["layers"], rank[case]["wrong"]) == (7, 0)


def test_how_the_weights_are_divided_changes_nothing(found: list[dict]):
    assert [rank["others"] for rank in found] == [{"fully_shard": [], "tensor parallel": []}] * 2


def test_each_tensor_is_gathered_when_it_comes(found: list[dict]):
    for rank in found:
        assert rank["gathers"]["first"] == "model.embed_tokens.weight"
        assert rank["gathers"]["bytes"] == 33 * 32 * 4, "a rank's rows of the embedding, padded, in FP32"
        assert rank["gathers"]["calls"] == 7 + 3 + 2, "a gather for each parameter, none for a scale or the tied head"
        assert rank["gathers"]["rest"] == 2 * 7 + 3 + 2
