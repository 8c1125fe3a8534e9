"""What the tests of operations share: a card that is not there."""

import pytest
import torch

from fp8engine.ops import device, triton_backend


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch):
    """A function that pretends a card of a capability and a name, and returns it; what was asked of it is forgotten."""
    asked = (
        *(device.capability, device.cpu_multiplies, device.product_dtype),
        *(triton_backend.installed, triton_backend.measured),
    )

    def forget() -> None:
        for cached in asked:
            cached.cache_clear()

    def pretend(capability: tuple[int, int], name: str = "") -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: name or "card of sm_{}{}".format(*capability))
        forget()
        return torch.device("cuda", 0)

    forget()
    yield pretend
    forget()
