"""How often operators are called: those that make the host wait for a device, or others by their names.

A copy to the host is no operator where the tensor is on a CPU: these tests do not see it.
"""

from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "bincount")


class Counted(TorchDispatchMode):
    """Counts the calls of torch's operators of these names."""

    def __init__(self, *names: str):
        super().__init__()
        self.names, self.count = names, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name.removeprefix("aten::") in self.names
        return func(*args, **(kwargs or {}))
