"""The one asynchronous copy to the host: what it holds, and what it asks of a card."""

import pytest
import torch

from fp8engine.files import HostCopy


def test_copies_keep_order_shape_and_values_whatever_becomes_of_the_originals():
    tensors = [torch.arange(6.0).view(2, 3).t().requires_grad_(), torch.tensor(7), torch.empty(0)]
    copy, before = HostCopy(tensors), [tensor.detach().clone() for tensor in tensors]
    for tensor in tensors:
        tensor.data.zero_()
    assert copy.done()
    for found, wanted in zip(copy.wait(), before, strict=True):
        assert torch.equal(found, wanted)
        assert (found.dtype, found.requires_grad) == (wanted.dtype, False)


class Card:
    """A CUDA tensor and torch.cuda, as far as a copy to the host uses them; `arrived` is what the event says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.arrived, self.log = False, []
        card = self

        class Event:
            def record(self, stream):
                card.log.append(f"record on {stream}")

            def query(self):
                return card.arrived

            def synchronize(self):
                card.log.append("synchronize")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
        monkeypatch.setattr(torch, "empty_like", self.empty_like)

    is_cuda, device = True, "cuda:0"

    def detach(self):
        return self

    def empty_like(self, original, *, device, pin_memory):
        assert (original, device, pin_memory) == (self, "cpu", True)
        return self

    def copy_(self, original, *, non_blocking):
        self.log.append(f"copy, non_blocking={non_blocking}")
        return self


def test_on_a_card_the_copy_is_pinned_behind_one_event_and_only_wait_waits(monkeypatch: pytest.MonkeyPatch):
    card = Card(monkeypatch)
    copy = HostCopy([card, card])  # pyright: ignore[reportArgumentType]  # a stand-in
    assert card.log == ["copy, non_blocking=True"] * 2 + ["record on stream of cuda:0"]
    assert not copy.done()
    card.arrived = True
    assert copy.done()
    assert "synchronize" not in card.log
    copy.wait()
    assert card.log[-1] == "synchronize"
