"""Private names of torch that the engine uses, each with its purpose, and names of parts as they were before wrappers.

Every other file uses public names of torch only; tests/house/test_torch_names.py checks that, and fails by name where
torch renames one of these.  All of them exist from torch 2.11 on, the oldest that pyproject.toml allows, to 2.13.

Where the engine's own tests replace a function of torch (`torch._scaled_mm`), it is looked up when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.overrides
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._higher_order_ops import effects
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx import traceback
from torch.utils import checkpoint
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "FakeTensor",  # one of them
    "FakeTensorMode",  # tensors with a shape and without memory: a step is planned on them
    "HigherOrderOperator",  # an operator that takes graphs, such as an autograd Function in one
    "OpOverload",  # one operation of torch, as a TorchDispatchMode is given it
    "TorchDispatchMode",  # every operation of a forward: flow, fe.amp.op_stats, the demo's FP16 matmuls
    "forward_ad",  # its _current_level is the depth of forward-mode AD; read where a call would cost a step
    "is_functorch_wrapped_tensor",  # a tensor of vmap or grad: its values cannot be read
    "no_dispatch",  # inside a subclass's __torch_dispatch__: operations on its plain parts
    "tree_leaves",  # tensors inside a model's arguments and results, whatever holds them
    "tree_map",
]

Function = TypeVar("Function", bound=Callable)
Model = TypeVar("Model", bound=nn.Module)  # of functions that change a model in place and give it back

norm_base = torch.nn.modules.batchnorm._NormBase  # every batch norm and instance norm
disable_current_modes = _disable_current_modes  # a stored tensor is read without its reader's modes seeing it

# Dispatch: whether an operation may be called directly, without torch's dispatcher.
dispatch_modes = torch._C._len_torch_dispatch_stack  # how many TorchDispatchModes are active
dispatch_mode_stack = _get_current_dispatch_mode_stack  # which: checkpointing inside compile is one of them
function_modes = torch.overrides._get_current_function_mode_stack  # autocast with lists is one of them
wrapper_subclass = torch.Tensor._make_wrapper_subclass  # a tensor without storage that holds others
no_torch_function = torch._C._disabled_torch_function_impl  # a tensor subclass that acts below autograd only

# Autograd and transforms.
graph_task = torch._C._current_graph_task_id  # number of the backward pass that is running; -1 outside of one
after_backward = torch.autograd.Variable._execution_engine.queue_callback  # called when this backward pass ends
apply_code = cast(Any, torch.autograd.Function.apply).__func__.__code__  # of the frame that calls a Function's forward
sequence_number = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]  # order of nodes
transforms_active = torch._C._are_functorch_transforms_active  # torch.func's grad, vjp, vmap, jvp
# A gradient of autograd.grad(is_grads_batched=True).
batched_by_autograd = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]
tracing = torch._C._is_tracing  # torch.jit.trace
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]  # or None
autocast_active = torch._C._is_any_autocast_enabled  # for any device

# Compilation.
function_in_graph = torch.ops.higher_order.autograd_function_apply  # an autograd Function that Dynamo has traced
outside_of_graphs = torch._disable_dynamo  # torch.compiler.disable that does not import Dynamo (a second)

# Operations without a public name.
unsafe_view = torch.ops.aten._unsafe_view.default  # a reshape that autograd does not know as a view
to_copy = torch.ops.aten._to_copy.default  # what x.to(...) dispatches to
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # what SDPA runs on a CPU
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
foreach_norm = torch._foreach_norm  # norms of many tensors in one launch
foreach_copy_ = torch._foreach_copy_
assert_async = torch._assert_async  # an assertion on a card that the host does not wait for
update_loss_scale = torch._amp_update_scale_  # what torch.amp.GradScaler itself calls


def runs_again() -> bool:
    """Whether what runs now, without gradients, runs again with them in backward: a reentrant checkpoint's first time.

    That is the forward of an autograd Function whose context has next functions: none where nothing needs a gradient.
    """
    inner = frame = sys._getframe()
    while frame is not None:
        first = frame.f_code is apply_code and inner.f_code.co_varnames[:1]
        if first and getattr(inner.f_locals.get(*first), "next_functions", ()):
            return True
        inner, frame = frame, frame.f_back
    return False


def graph_break(why: str) -> None:
    """End the graph that Dynamo traces; with fullgraph=True it raises with these words."""
    torch._dynamo.graph_break(msg=why)


def ordered_effect(operator: str) -> None:
    """Let torch.compile keep the order of an operator that writes a table nobody returns: never dropped nor moved.

    Declared mutations would make each compiled region copy the whole table back, which loses what others wrote.
    """
    effects._register_effectful_op(operator, effects._EffectType.ORDERED)


def in_checkpoint_of_graph() -> bool:
    """Whether what is traced now, inside a graph's checkpoint, runs again in its backward.

    torch 2.13 runs a mode there; 2.11 does so for checkpoints with a context_fn, and marks nodes for others.
    """
    modes = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)
    runs_a_mode = any(isinstance(mode, modes) for mode in dispatch_mode_stack())
    return runs_a_mode or traceback.get_current_meta().get("recompute") is not None


def constant_in_graphs(function: Function) -> Function:
    """Let Dynamo call a function while it traces, and put its result into the graph as a constant."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


def _traced() -> Any:
    """What Dynamo makes of the code that it traces; None where torch.export traces without Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # a second; whoever traces has imported it

    try:
        return InstructionTranslator.current_tx().output
    except AttributeError:
        return None


def traced_graph() -> Any:
    """The torch.fx graph that Dynamo is tracing; None where torch.export traces without Dynamo."""
    return getattr(_traced(), "graph", None)


def first_graph() -> bool:
    """Whether Dynamo, which traces now, has compiled no graph of this function before."""
    from torch._guards import CompileContext

    found = CompileContext.current_compile_id()
    return found is not None and found.frame_compile_id == 0


def traced_alone(function: str) -> bool:
    """Whether the function of that qualified name is all that Dynamo traces: Python code has called it."""
    traced = _traced()
    return traced is not None and traced.root_tx.f_code.co_qualname == function


constant_in_graphs(traced_alone)


def is_compiled(function: Callable) -> bool:
    """Whether torch.compile has made the function, or the function of a bound method."""
    return hasattr(function, "_torchdynamo_orig_callable")


def may_divide() -> bool:
    """Whether Dynamo traces something that it may divide into several graphs: not with fullgraph=True, no export."""
    traced = _traced()
    return traced is not None and not (traced.root_tx.one_graph or traced.root_tx.error_on_graph_break)


constant_in_graphs(may_divide)


def recompile_limit() -> int:
    """How many graphs of one function Dynamo compiles before it leaves the function in eager code."""
    return torch._dynamo.config.recompile_limit


def compiled_autograd() -> bool:
    """Whether torch compiles the backward pass as well, of whatever Python code (compiled autograd)."""
    from torch._dynamo import compiled_autograd, config  # whoever traces has imported them

    return config.compiled_autograd or compiled_autograd.compiled_autograd_enabled


constant_in_graphs(compiled_autograd)


def transforms_traced() -> bool:
    """`transforms_active` for code that Dynamo traces: whether it traces inside of a transform."""
    return transforms_active()


constant_in_graphs(transforms_traced)


def made_in_graph(name: str) -> None:
    """Tell Dynamo, which calls this, that its caller's local tensor of that name was made in the graph that it traces.

    In the body of a higher-order operator (a checkpoint) Dynamo lets only such objects be given attributes; it knows
    that of objects, and of a tensor it takes the opposite for granted.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationNew, is_side_effect_safe

    tensor = InstructionTranslator.current_tx().output.current_tx.symbolic_locals[name].realize()
    if tensor.mutation_type is not None and not is_side_effect_safe(tensor.mutation_type):
        tensor.mutation_type = AttributeMutationNew()


def active_ddp() -> nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is running."""
    return nn.parallel.DistributedDataParallel._active_ddp_module


def joins_uneven_inputs(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    """Whether the wrapper's `join()` is active: ranks may end at different steps."""
    return wrapper._join_config.enable


def scaled_mm(*operands, **options) -> torch.Tensor:
    """torch._scaled_mm: cuBLASLt's FP8 matmul."""
    return torch._scaled_mm(*operands, **options)


def scaled_grouped_mm(*operands, **options) -> torch.Tensor:
    """torch._scaled_grouped_mm: one FP8 matmul per group of rows."""
    return torch._scaled_grouped_mm(*operands, **options)


# Wrappers: what each class calls the module that it holds.  The class decides, not the name alone: a model may call
# a part of its own `module`.
HELD_AS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",  # torch.compile
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ActivationWrapper": "_checkpoint_wrapped_module",  # of torch's apply_activation_checkpointing
}
HELD = frozenset(HELD_AS.values())

# Wrappers that stand around a model or a part of it while it trains, as an error message names them.
WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "DataParallel": "nn.DataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
    "OptimizedModule": "torch.compile",
}


def wrapper_of(module: nn.Module) -> str | None:
    """The name of the wrapper that a module is, such as DistributedDataParallel, or None."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    return next((WRAPPERS[kind] for kind in WRAPPERS if kind in kinds), None)


def plain_name(model: nn.Module, name: str) -> str:
    """The name that a part, a parameter or a buffer of `model` has without the wrappers around the model or its parts.

    >>> plain_name(nn.DataParallel(nn.Sequential(nn.Linear(2, 2))), "module.0.weight")
    '0.weight'
    >>> plain_name(nn.ModuleDict({"module": nn.Linear(2, 2)}), "module.weight")
    'module.weight'
    """
    kept, here = [], model
    for part in name.split("."):
        if part not in HELD or part not in (HELD_AS.get(kind.__name__) for kind in type(here).__mro__):
            kept.append(part)
        child = next((module for key, module in here._modules.items() if key == part), None)
        here = here if child is None else child  # a compiled one may refuse `or`; a ScriptModule's table has no get
    return ".".join(kept)


def model_parameter(stepped: torch.Tensor) -> torch.Tensor:
    """The model's parameter that an optimizer steps: the one that an FP32 master stands for, else itself."""
    return getattr(stepped, "_fp8engine_master_of", stepped)


def is_dtensor(x: Any) -> bool:
    """Whether it is a DTensor; found by the class's name, without an import."""
    return any(kind.__name__ == "DTensor" for kind in type(x).__mro__)


def divided_parameter(module: nn.Module) -> str | None:
    """The name of a parameter of the module itself that is a DTensor."""
    return next((name for name, p in module._parameters.items() if is_dtensor(p)), None)


def all_gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """torch.distributed's all-gather of one tensor, under the name that it has had since 2.13, or before."""
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(whole, part, group=group)


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """torch.distributed's reduce-scatter of one tensor, under the name that it has had since 2.13, or before."""
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(part, whole, group=group)


def sharded_parameters(module: Any) -> list[Any]:
    """The FSDPParams, fully_shard's record of each parameter, of a module that it was called on."""
    return [parameter for group in _fsdp_groups(module) for parameter in group.fsdp_params]


def _fsdp_groups(module: Any) -> list[Any]:
    """The FSDPParamGroups of a module that fully_shard was called on; one, as a rule."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; before, one or None
    groups = [state._fsdp_param_group] if groups is None else groups
    return [group for group in groups if group is not None]


def local_tensor(x: Any) -> torch.Tensor:
    """The local tensor that a DTensor holds, itself: `to_local` makes a view of it where gradients are recorded."""
    return x._local_tensor


def around_methods(module: Any, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Call functions around methods of a module that register_fsdp_forward_method was given: they run no hooks.

    Its forward runs what fully_shard has registered, which is not replaced.  Without fully_shard there is none such.
    """
    if (state := getattr(module, "_get_fsdp_state", lambda: None)()) is not None:
        before, after = state._pre_forward, state._post_forward
        state._pre_forward = lambda *given: (begin(), before(*given))[1]
        state._post_forward = lambda *given: (after(*given), end())[0]


def forget_gathered(module: Any, parameter: Any) -> None:
    """Forget the unsharded form of an FSDPParam of a module: its next all-gather may have another dtype.

    A module that is unsharded, or whose gather is under way, is sharded again before.
    """
    for group in _fsdp_groups(module):
        group.wait_for_unshard()
        group.reshard()
    parameter.all_gather_outputs = []
    vars(parameter).pop("_unsharded_param", None)


def call_first(module: nn.Module, hook: Callable) -> bool:
    """Move a forward pre-hook that a module has before its others; False where it has none such."""
    hooks: Any = module._forward_pre_hooks  # an OrderedDict
    for key, found in hooks.items():
        if found == hook:
            hooks.move_to_end(key, last=False)
            return True
    return False


_HOOKED = ("step", "state_dict", "load_state_dict")
HOOK_TABLES = tuple(f"_optimizer_{method}_{when}_hooks" for method in _HOOKED for when in ("pre", "post"))


def step_without_hooks(optimizer: Any, *closure: Callable) -> Any:
    """Step an optimizer inside of another one's step, around which torch has run the hooks."""
    own = vars(optimizer).get("step")  # as a scheduler puts there, to know that a step was made, or other code
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return own(*closure)
    optimizer._opt_called = True
    step = type(optimizer).step
    return (step.__wrapped__ if hasattr(step, "hooked") else step)(optimizer, *closure)


def group_of_collective(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    """The group that a collective runs in, from its arguments by name, as a mode sees them."""
    group = arguments.get("process_group")
    if group is None:
        group = dist.distributed_c10d._resolve_process_group(arguments["group_name"])
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return group


def reduce_scatter_groups(module: nn.Module) -> list[dist.ProcessGroup]:
    """The process groups over which a module that fully_shard was given reduces its gradients; one, as a rule."""
    # A group of `replicate` has no shards, and reduces by an all-reduce.
    sharded = [group for group in _fsdp_groups(module) if hasattr(group.mesh_info, "shard_process_group")]
    return [group._reduce_scatter_process_group for group in sharded]


def spin(cycles: int) -> None:
    """Let the current card do nothing for so many cycles, so that the host gets ahead of it."""
    torch.cuda._sleep(cycles)


def default_store() -> dist.Store:
    """The store by which the ranks of the default process group met: small messages without a collective."""
    return dist.distributed_c10d._get_default_store()


def begin_fake_ranks(ranks: int) -> None:
    """Initialise torch.distributed with its "fake" backend: this process is rank 0 of `ranks`; no other exists.

    Its collectives return at once, with whatever their outputs held.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
