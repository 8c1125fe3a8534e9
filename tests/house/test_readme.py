"""The pages tell the truth: examples run, links and targets exist, and the printed file tree is the disk.

Three kinds of fenced block, by the words after the fence:

    ```python                  run, in order, in one namespace a page; as a doctest if it opens with >>>
    ```python no-run: reason   not run, for the reason a reader sees
    ```diff                    of the README: the script that the diff ends in runs, and warns once

Pages run on a CPU and show what a user writes there, so the warning that FP8 is emulated is expected, not filtered out
in each page.
"""

import doctest
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_models import byte_llama

from benchmarks.tree import tree
from fp8engine.errors import EmulationWarning

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
FOLDERS = (".", "docs", "kernels", "benchmarks", "examples")
PAGES = [README, *sorted({page for folder in FOLDERS for page in (ROOT / folder).glob("*.md")} - {README})]
CODE = [
    file for room in ("fp8engine", "kernels") for file in (ROOT / room).rglob("*.py") if "docs/" in file.read_text()
]
MISNAMED = "a python block is `python`, or `python no-run: the reason`"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


class Block(NamedTuple):
    """One fenced block: the words after its fence, its text, and the line of the page it starts on."""

    info: str
    text: str
    line: int


def test_the_printed_tree_lists_every_file_and_what_it_is():
    command = [sys.executable, str(ROOT / "benchmarks" / "tree.py")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    files = [path for room in ("fp8engine", "kernels") for path in (ROOT / room).rglob("*.py")]
    on_disk = {str(path.relative_to(ROOT)) for path in files if path.name != "__init__.py"}
    on_disk = {path for path in on_disk if not path.startswith("fp8engine/kernels/")}  # a link to kernels/
    assert {path for path in paths(shown) if path.endswith(".py")} == on_disk
    assert [row for row in shown.splitlines() if re.fullmatch(r" *\S+\.py", row)] == []  # a file without a docstring


def test_the_tree_has_the_first_sentence_of_a_docstring(tmp_path: Path):
    for file, source in {
        "fp8engine/ops/a.py": '"""Casts by row. More of it."""\n',
        "kernels/b.py": '"""One: two."""\n',
    }.items():
        (path := tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    rows = [re.sub(" {2,}", " | ", row.strip()) for row in tree(tmp_path).splitlines()]
    assert rows == ["fp8engine/", "ops/", "a.py | Casts by row", "kernels/", "b.py | One"]


def test_every_file_that_the_architecture_names_exists():
    names = set(re.findall(r"`([\w/]+\.py)`", ARCHITECTURE.read_text()))
    assert len(names) > 20
    assert {name for name in names if not (ROOT / name).exists() and not (ROOT / "fp8engine" / name).exists()} == set()


@pytest.mark.short
@pytest.mark.slow
@every_page
@pytest.mark.filterwarnings("ignore::fp8engine.errors.EmulationWarning")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft uses an older name of transformers
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    examples = [block for block in blocks(page.read_text()) if block.info.split(" ")[0] == "python"]
    namespace = {"__name__": "__main__"}
    monkeypatch.chdir(tmp_path)  # what an example writes
    if page.name == "getting-started.md":
        byte_llama(tmp_path / "smollm2")  # stands in for the model that the page has the reader install
    for block in examples:
        if block.info == "python":
            run(block, page, namespace)
        else:
            assert re.fullmatch(r"python no-run: \S.+", block.info), f"{page.name}:{block.line}: {MISNAMED}"


def test_the_diff_of_the_readme_works_as_pasted():
    """Three lines added to an ordinary script; the emulation on a CPU is said once, and nothing else is warned of."""
    (diff,) = [block for block in blocks(README.read_text()) if block.info == "diff"]
    marks = [line[:1] for line in diff.text.splitlines()]
    assert (marks.count("+"), marks.count("-")) == (3, 0)
    script = "".join(line[1:] or line for line in diff.text.splitlines(keepends=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(diff._replace(text=script), README, {"__name__": "__main__"})
    assert [warning.category for warning in caught] == [EmulationWarning]


def test_the_index_lists_every_page():
    index = ROOT / "docs" / "README.md"
    targets = set(re.findall(r"\]\(([^)\s#]+)\)", index.read_text()))
    pages = {str(page.relative_to(index.parent)) for page in index.parent.rglob("*.md")} - {"README.md"}
    assert pages - targets == set()


@every_page
def test_links_lead_somewhere_and_those_to_a_part_of_a_page_name_one_of_its_headings(page: Path):
    found = links(page)
    assert [target for target, file, _ in found if not file.exists()] == []
    assert [target for target, file, part in found if part and part not in parts(file.read_text())] == []


def test_a_heading_becomes_the_name_of_its_part():
    text = "# What it costs, in `FP8`\n```sh\n# no heading\n```\n### A [link](page.md): a name_of 2\n"
    assert parts(text) == {"what-it-costs-in-fp8", "a-link-a-name_of-2"}


@pytest.mark.parametrize("file", CODE, ids=lambda file: str(file.relative_to(ROOT)))
def test_pages_that_the_code_names_exist(file: Path):
    assert [page for page in re.findall(r"\bdocs/[\w-]+\.\w+", file.read_text()) if not (ROOT / page).exists()] == []


@every_page
def test_make_targets_exist(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    code = " ; ".join(block.text for block in blocks(page.read_text()) if block.info in ("sh", "bash", "console"))
    code += " ; ".join(re.findall(r"`([^`\n]+)`", page.read_text()))
    assert set(re.findall(r"\bmake ([a-z-]+)", code)) <= targets


def test_a_tree_reads_as_paths():
    assert paths("fp8engine/        the library\n  amp/\n    scaler.py  loss scaling\n  ops.py\nMakefile\n") == [
        "fp8engine",
        "fp8engine/amp",
        "fp8engine/amp/scaler.py",
        "fp8engine/ops.py",
        "Makefile",
    ]


def test_a_wrong_example_is_found():
    page = Path("page.md")
    script, session = blocks("```python\nx = 1\nassert x == 2\n```\n\n```python\n>>> 1 + 1\n3\n```\n")
    with pytest.raises(AssertionError):
        run(script, page, {})
    with pytest.raises(doctest.DocTestFailure):
        run(session, page, {})


def paths(tree: str) -> list[str]:
    """A tree's lines as paths from the repository's root: two spaces of indent a level, folders end in `/`."""
    found, folders = [], []
    for row in tree.splitlines():
        name = row.strip().split(" ")[0]
        if name:
            depth = (len(row) - len(row.lstrip())) // 2
            folders[depth:] = [name.rstrip("/")]
            found.append("/".join(folders))
    return found


def links(page: Path) -> list[tuple[str, Path, str]]:
    """(target, its file, its part or "") of the links of a page to files of the repository."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if ":" not in target]
    found = [(target, *target.partition("#")[::2]) for target in targets]
    return [(target, page.parent / file if file else page, part) for target, file, part in found]


def parts(text: str) -> set[str]:
    """The names of a page's headings in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    fence = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [Block(m[1].strip(), m[2], text.count("\n", 0, m.start()) + 2) for m in fence.finditer(text)]


def run(block: Block, page: Path, namespace: dict) -> None:
    """Run one example; a failure shows the page and its line."""
    if block.text.startswith(">>>"):
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        test = doctest.DocTestParser().get_doctest(block.text, namespace, page.name, str(page), block.line - 1)
        doctest.DebugRunner(optionflags=flags).run(test, clear_globs=False)
        namespace.update(test.globs)
    else:
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)


def test_the_readme_is_read_in_minutes():
    assert len(README.read_text().splitlines()) <= 130
