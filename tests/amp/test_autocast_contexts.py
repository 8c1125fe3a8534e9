"""fe.amp.autocast in threads, under torch.compile and with checkpointing: the lists go along, or an error says not."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from fp8engine.amp.autocast import autocast, keep_lists
from fp8engine.amp.lists import OpLists

LISTS = OpLists(white=["softmax"], black=["matmul", "linear"])
amp = autocast("cpu", dtype=torch.float16, lists=LISTS)
WANT = [torch.float32, torch.float16, torch.float32, torch.float16]


def body(x: torch.Tensor) -> list[torch.Tensor]:
    return [x @ x, torch.softmax(x, -1), F.linear(x, x), torch.mm(x, x)]


def inside(x: torch.Tensor) -> list[torch.Tensor]:
    with autocast("cpu", dtype=torch.float16, lists=LISTS):
        return body(x)


def inside_with_new_lists(x: torch.Tensor) -> list[torch.Tensor]:
    with autocast("cpu", torch.float16, lists=OpLists(white=["F.softmax"], black=["torch.matmul", "linear"])):
        return body(x)


def nested(x: torch.Tensor) -> list[torch.Tensor]:
    with autocast("cpu", dtype=torch.bfloat16, lists=OpLists(white=["softmax"], black=["matmul", "linear", "mm"])):
        with autocast("cpu", dtype=torch.float16, lists=OpLists(white=["mm"])):
            results = body(x)
        with autocast("cpu", enabled=False):
            return [*results, x.softmax(-1)]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [inside, inside_with_new_lists, nested, amp(body)])
def test_compiled_whole_it_computes_the_same(function, backend: str):
    found = []
    for call in (function, torch.compile(function, fullgraph=True, backend=backend)):
        x = torch.randn(4, 4, generator=torch.manual_seed(1), requires_grad=True)
        values = call(x)
        loss = torch.stack([value.float().sum() for value in values]).sum()
        found.append((values, *torch.autograd.grad(loss, x)))
    (want, theirs), (got, ours) = found
    assert [value.dtype for value in got][:4] == WANT
    assert all(map(torch.equal, got, want))
    # AOTAutograd merges equal casts, so that two gradients are added in FP16: one rounding of u = 2^-11
    assert (ours - theirs).abs().max() <= (0 if backend == "eager" else 2.0**-11 * theirs.abs().max())


@pytest.mark.usefixtures("fresh")
def test_around_a_compiled_function():
    compiled, x = torch.compile(body, fullgraph=True, backend="aot_eager"), torch.randn(4, 4)
    for on in (True, False, True):  # compiled again: the mode is guarded
        with amp if on else nullcontext():
            assert [value.dtype for value in compiled(x)] == (WANT if on else [torch.float32] * 4)


@pytest.mark.usefixtures("fresh")
def test_what_a_function_hides_is_said_while_compiling():
    attend = torch.compile(amp(lambda q: F.scaled_dot_product_attention(q, q, q)), fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match="'matmul' is black in these OpLists, but scaled_dot_product_attention"):
        assert attend(torch.randn(1, 2, 4, 8)).dtype == torch.float16


def dtypes(x: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    return x.softmax(-1).dtype, torch.mm(x, x).dtype


def test_one_object_in_two_threads_gives_each_its_own_state_back():
    x, seen, entered, left = torch.randn(4, 4), [], threading.Event(), threading.Event()

    def other() -> None:
        seen.append(dtypes(x))  # lists belong to the thread that entered them
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with amp:
                entered.set()
                left.wait()
                seen.append(dtypes(x))
            seen.append(dtypes(x))

    thread = threading.Thread(target=other)
    with amp:
        thread.start()
        entered.wait()
    seen.append(dtypes(x))
    left.set()
    thread.join()
    plain, half = (torch.float32, torch.float32), (torch.float16, torch.float16)
    assert seen == [plain, plain, half, (torch.float32, torch.bfloat16)]


def test_replicas_of_a_decorated_forward_have_their_lists():
    # What nn.DataParallel does with its replicas, which it refuses to make without cards.
    run = amp(lambda x: [value.dtype for value in body(x)])
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, [torch.randn(4, 4)] * 4)) == [WANT] * 4


class Block(nn.Module):
    """A product, a softmax and a product; `dtypes` notes what each forward saw."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, generator=torch.manual_seed(3)))
        self.dtypes = []

    def forward(self, x):
        scores = x @ self.weight
        shares = torch.softmax(scores, -1)
        self.dtypes.append((scores.dtype, shares.dtype))
        return shares @ self.weight


def gradients(run, block: Block) -> list[torch.Tensor]:
    x = torch.randn(4, 8, generator=torch.manual_seed(4), requires_grad=True)
    run(block, x).float().square().sum().backward()
    return [x.grad, block.weight.grad]  # pyright: ignore[reportReturnType]  backward has set them


def plain(block, x):
    with amp:
        return block(x)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_decorated_block_recomputes_under_its_lists(reentrant: bool, outside: bool):
    def run(block, x):
        with autocast("cpu", dtype=torch.bfloat16, enabled=outside):
            return checkpoint(amp(block), x, use_reentrant=reentrant)

    block = Block()
    assert all(map(torch.equal, gradients(run, block), gradients(plain, Block())))
    assert block.dtypes == [(torch.float32, torch.float16)] * 2


def test_keep_lists_recomputes_under_all_surrounding_lists():
    def twice(block, x, **how):
        outer = autocast("cpu", dtype=torch.float16, lists=OpLists(white=["softmax"], black=["exp"]))
        with outer, autocast("cpu", lists=OpLists(black=["matmul"])):
            return checkpoint(block, x, use_reentrant=False, **how)

    block = Block()
    found = gradients(lambda b, x: twice(b, x, context_fn=keep_lists), block)
    assert all(map(torch.equal, found, gradients(plain, Block())))
    assert block.dtypes == [(torch.float32, torch.float16)] * 2
    with pytest.raises(CheckpointError, match="different metadata"):
        gradients(twice, Block())


def test_keep_lists_allows_two_backward_passes():
    block = Block()
    with amp:
        loss = checkpoint(block, torch.randn(4, 8), use_reentrant=False, context_fn=keep_lists).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert block.dtypes == [(torch.float32, torch.float16)] * 3


@pytest.mark.usefixtures("fresh")
def test_a_compiled_block_checkpointed_has_its_lists():
    x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    function = lambda x: F.linear(x, weight).exp()  # noqa: E731
    got = checkpoint(torch.compile(amp(function), fullgraph=True, backend="aot_eager"), x, use_reentrant=False)
    assert got.dtype == torch.float32
    assert all(map(torch.equal, *(torch.autograd.grad(y.sum(), weight) for y in (got, function(x)))))


@pytest.mark.usefixtures("fresh")
def test_a_checkpoint_in_a_compiled_function_loses_the_lists_as_documented():
    checkpointed = amp(lambda x: checkpoint(lambda x: x @ x, x, use_reentrant=False))
    x = torch.ones(4, 4, requires_grad=True)
    assert checkpointed(x).dtype == torch.float32
    # Dynamo in torch 2.13 drops function modes there.  Red once it keeps them: then autocast's docstring changes, too.
    assert torch.compile(checkpointed, backend="eager")(x).dtype == torch.float16
