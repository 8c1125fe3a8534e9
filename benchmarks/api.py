"""The API reference, docs/api.md: every public name with its signature and docstring, as `help` would print them.

    python benchmarks/api.py            print the page
    python benchmarks/api.py --write    write docs/api.md (tests/house/test_api.py holds it)

Public: `fe.__all__`, and of its modules their own `__all__`, or where there is none what they define without an
underscore.  Examples of docstrings run as doctests; the page shows them and does not run them again.
"""

import enum
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

import fp8engine as fe

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
OPENING = """# API reference

For those who know what they look for: every public name, its signature, shapes, units and errors.
The other [pages](README.md) say when to use what.
Written from the docstrings by `python benchmarks/api.py --write`; `help(fe.convert)` prints the same.
"""
WIDE = 100  # characters: a longer signature is broken
INHERITED = (object, torch.nn.Module, torch.nn.Linear, torch.Tensor, Exception, tuple, dict, str, enum.Enum)


def page() -> str:
    """The whole page."""
    names = {name: getattr(fe, name) for name in fe.__all__}
    kinds = {
        "Functions": {k: v for k, v in names.items() if inspect.isfunction(v)},
        "Classes": {k: v for k, v in names.items() if inspect.isclass(v)},
        "Formats": {k: v for k, v in names.items() if isinstance(v, fe.Format)},
    }
    parts = [OPENING]
    for title, found in kinds.items():
        parts += [f"## {title}\n"]
        parts += [text for name, each in sorted(found.items()) for text in entry(f"fe.{name}", each)]
    for name, module in sorted(names.items()):
        if isinstance(module, ModuleType):
            parts += [f"## fe.{name}\n", *documented(module)]
            parts += [text for own, each in members(module) for text in entry(f"fe.{name}.{own}", each)]
    return "\n".join(parts)


def members(module: ModuleType) -> list[tuple[str, object]]:
    """A module's public names."""
    listed = getattr(module, "__all__", None)
    if listed is None:
        own = {k: v for k, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
        listed = [name for name in own if not name.startswith("_")]
    return [(name, getattr(module, name)) for name in sorted(listed)]


def entry(name: str, thing: object) -> Iterator[str]:
    """A name's signature and docstring, and those of a class's own methods and properties."""
    if isinstance(thing, ModuleType):
        yield from [f"### {name}\n", *documented(thing)]
        return
    error = inspect.isclass(thing) and issubclass(thing, (Exception, Warning))
    title = f"{name}{signature(thing)}"
    yield f"### {name}\n"
    if not inspect.isclass(thing) and not callable(thing):
        yield f"`{thing!r}`\n"
        return
    if not error:
        yield f"```text\n{title}\n```\n"
    yield from documented(thing)
    if inspect.isclass(thing) and not error:
        for own, method in sorted(vars(thing).items()):
            plain = getattr(method, "__func__", method)
            if own.startswith("_") or own == "forward" or not inspect.getdoc(plain) or own in inherited(thing):
                continue
            if inspect.isfunction(plain):
                yield f"```text\n.{own}{signature(plain)}\n```\n"
                yield from documented(plain)
            elif isinstance(plain, property):
                yield f"```text\n.{own}\n```\n"
                yield from documented(plain)


def inherited(thing: type) -> set[str]:
    """Names that a class has from torch or Python, whose own documentation has them."""
    return {name for base in INHERITED if issubclass(thing, base) for name in dir(base)}


def signature(thing: object) -> str:
    """As Python writes it, without the module names of types; a long one has a line for each argument.

    >>> signature(lambda x, scale=2.0: x)
    '(x, scale=2.0)'
    """
    try:
        found = inspect.signature(thing)  # pyright: ignore[reportArgumentType] - callable, or raises
    except (TypeError, ValueError):
        return ""
    text = _plain(str(found))
    if len(text) <= WIDE:
        return text
    parts, kinds, bare = [], inspect.Parameter, False
    for each in found.parameters.values():
        if each.kind == kinds.KEYWORD_ONLY and not bare and not any("*" in part for part in parts):
            parts.append("*")
        bare |= each.kind == kinds.KEYWORD_ONLY
        parts.append(_plain(str(each)))
    back = _plain(f" -> {inspect.formatannotation(found.return_annotation)!s}")
    returns = "" if found.return_annotation is inspect.Signature.empty else back
    return "(\n" + "".join(f"    {part},\n" for part in parts) + ")" + returns


def _plain(text: str) -> str:
    """A signature's text without addresses, quotes round annotations, and the modules of names."""
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", re.sub(r" at 0x\w+", "", text))
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=\w)", "", text)


def documented(thing: object) -> Iterator[str]:
    """The docstring: its prose in one block, its examples in another."""
    prose, _, examples = (inspect.getdoc(thing) or "").partition("\n\n>>> ")
    if prose:
        yield f"```text\n{prose.strip()}\n```\n"
    if examples:
        yield f"```pycon\n>>> {examples.strip()}\n```\n"


def main() -> None:
    """Print the page, or write it."""
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page())
    else:
        print(page())


if __name__ == "__main__":
    main()
