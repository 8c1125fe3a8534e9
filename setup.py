"""What pyproject.toml cannot say: README.md as it is read outside of the repository, and that no sdist is built."""

import re
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
# [words](target) and ![words](target) of a file beside README.md; not of an address, and not of a heading in it.
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def outside(readme: str, repository: str | None) -> str:
    """A README whose links lead to the repository; without links and pictures where its address is not known."""

    def absolute(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if repository is None:
            return "" if picture else words
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/HEAD/{target})"

    parts = re.split(r"(```.*?```)", readme, flags=re.DOTALL)  # every second one is code
    return "".join(part if place % 2 else LINK.sub(absolute, part) for place, part in enumerate(parts))


class NoSdist(sdist):
    """fp8engine/kernels is a link, which an archive of sources would hold as a second copy of kernels/."""

    def run(self) -> None:
        """Say so, and what to build."""
        raise SystemExit("fp8engine builds no sdist: it would lack what the tests read; build a wheel: pip wheel .")


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    setup(
        long_description=outside((ROOT / "README.md").read_text(), urls.get("Repository")),
        long_description_content_type="text/markdown",
        cmdclass={"sdist": NoSdist},
    )
