"""Fields of a recipe as JSON: formats and casts as objects, tuples as lists."""

from __future__ import annotations

from typing import Any

from fp8engine.numerics.cast import Cast, PerBlock, PerRow, PerTensor
from fp8engine.numerics.formats import Format


def encoded(value: Any) -> Any:
    """A field's value as JSON takes it."""
    if isinstance(value, Format):
        return {"format": value.name}
    if isinstance(value, Cast):
        kind = {"kind": type(value.granularity).__name__, **vars(value.granularity)}
        return {
            "cast": value.format.name,
            "granularity": kind,
            "scaling": value.scaling,
            "power_of_2": value.power_of_2,
        }
    return [encoded(each) for each in value] if isinstance(value, tuple) else value


def decoded(value: Any) -> Any:
    """What `encoded` was given.  Raises KeyError and TypeError for another object.

    >>> decoded(encoded((Cast(Format.named("E4M3")), 16)))
    (Cast(format=E4M3, granularity=PerTensor(), scaling='current', power_of_2=False), 16)
    """
    if isinstance(value, list):
        return tuple(decoded(each) for each in value)
    if not isinstance(value, dict):
        return value
    if "format" in value:
        return Format.named(value["format"])
    kind = dict(value["granularity"])
    granularity = {"PerTensor": PerTensor, "PerRow": PerRow, "PerBlock": PerBlock}[kind.pop("kind")](**kind)
    return Cast(Format.named(value["cast"]), granularity, value["scaling"], power_of_2=value["power_of_2"])
