"""A controller's state as plain values, so that a resumed run decides as the uninterrupted one would have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fp8engine.numerics.formats import Format
from fp8engine.scaling.choice import Choice


def choices_to_list(choices: Mapping[int, Choice]) -> list[dict]:
    """Each group's choice once, in types that JSON knows; reasons are in the log."""
    groups = {id(choice): choice for choice in choices.values()}.values()
    return [
        {
            "grain": choice.grain,
            "formats": [[layer, role, format.name] for (layer, role), format in choice.formats.items()],
            "fp8": sorted([layer, matmul] for layer, matmul in choice.fp8),
            "margin": choice.margin,
            "cheaper": choice.cheaper,
            "changes": choice.changes,
        }
        for choice in groups
    ]


def choices_from_list(found: Iterable[Mapping]) -> dict[int, Choice]:
    """The inverse of `choices_to_list`.

    >>> from fp8engine.scaling.choice import begin
    >>> from fp8engine.numerics.recipe import auto
    >>> choices = {0: begin([0], auto())}
    >>> choices_from_list(choices_to_list(choices)) == choices
    True
    """
    choices = {}
    for group in found:
        formats = {(int(layer), role): Format.named(name) for layer, role, name in group["formats"]}
        fp8 = frozenset((int(layer), matmul) for layer, matmul in group["fp8"])
        margin, cheaper, changes = (int(group[key]) for key in ("margin", "cheaper", "changes"))
        choice = Choice(group["grain"], formats, fp8, margin, None, cheaper, changes)
        choices |= {layer: choice for layer, _ in formats}
    return choices
