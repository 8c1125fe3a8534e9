"""nn.Modules: parameters, a place in the scaling state, one functional call."""

from fp8engine.modules.linear import Linear

__all__ = ["Linear"]
