"""The built documentation site, as a person sees it in Chromium, and its links."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("playwright.sync_api", reason="the group `browser` is not installed")
from axe_playwright_python.sync_playwright import Axe

from idemgate.guard.options import GuardOptions
from idemgate.topics.policy import _DEFAULTS, TopicOptions
from tests.operate.test_page import Seen, browser, expect  # noqa: F401
from tests.unit.test_site import ENTRIES
from tools import site

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("zensical") is None, reason="the group `site` is not installed"),
]
LOOKED_AT = ["", "docs/concepts/", "docs/guides/failures/", "docs/reference/once/"]


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. There was no warning."""
    return site.build(tmp_path_factory.mktemp("site"))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def address(html: Path) -> Iterator[str]:
    """The address of a web server that serves the site."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=html)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join(30)


class Links(HTMLParser):
    """The links of a page, what links to it may name, and texts that are still Markdown."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.ids = set[str](), set[str]()
        self.unread = list[str]()
        self.inside = list[str]()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"code", "script"}:
            self.inside.append(tag)
        for name, value in attrs:
            if name in {"href", "src"} and value is not None:
                self.links.add(value)
            elif name == "id" and value is not None:
                self.ids.add(value)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.inside:
            self.inside.remove(tag)

    def handle_data(self, data: str) -> None:
        if not self.inside and ("](" in data or "::: " in data):
            self.unread.append(data)


links_of = cache(Links)


def test_no_link_is_dead(html: Path) -> None:
    dead = list[str]()
    for page in html.rglob("*.html"):
        for link in links_of(page).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            start = html if parts.path.startswith("/") or page.name == "404.html" else page.parent
            found = start / unquote(parts.path).lstrip("/") if parts.path else page
            found = found / "index.html" if found.is_dir() else found
            if not found.is_file() or (
                parts.fragment and found.suffix == ".html" and unquote(parts.fragment) not in links_of(found).ids
            ):
                dead.append(f"{page.relative_to(html)}: {link}")
    assert dead == []


def test_no_text_is_still_markdown(html: Path) -> None:
    assert [(page, text) for page in html.rglob("*.html") for text in links_of(page).unread] == []


def test_each_entry_of_the_reference_is_there(html: Path) -> None:
    there = {id_ for page in html.glob("docs/reference/*/index.html") for id_ in links_of(page).ids}
    assert {*ENTRIES} - there == set()


@pytest.mark.parametrize(("entry", "options"), [("once", GuardOptions), ("topic", TopicOptions)])
def test_each_option_has_a_row_with_its_type_and_default(html: Path, entry: str, options: Any) -> None:
    page = (html / "docs" / "reference" / entry / "index.html").read_text(encoding="utf-8")
    table = page[page.index(f'id="idemgate.Gate.{entry}"') :].partition("</table>")[0]
    rows = [row.split("<td")[1:] for row in table.split("<tr")[2:]]
    kinds, known = ({cells[0].split("code>")[1][:-2]: "<code>" in cells[n] for cells in rows} for n in (1, 3))
    assert [name for name in options.__annotations__ if not (kinds.get(name) and known.get(name))] == []


def test_the_defaults_of_topics_are_those_of_the_code() -> None:
    from tools.site.options import defaults  # of the group `site`

    words = {"none": None, "no limit": None, "30 s": "30s", "24 h": "24h", "30 days": "30d", "False": False}
    guide = {name: words.get(default, default.strip('"').replace(",", "")) for name, default in defaults()[1].items()}
    code = {name: str(value) if type(value) is int else value for name, value in _DEFAULTS.items()}
    assert code | {"backoff": "1 s to 10 min with jitter"} == guide


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_readable(address: str, browser: Any, scheme: str, width: int) -> None:  # noqa: F811
    seen = Seen(browser, address, color_scheme=scheme, viewport={"width": width, "height": 900})
    for page in LOOKED_AT:
        seen.tab.goto(address + page)
        expect(seen.tab.locator("h1").first).to_be_visible()
        broken = "[...document.images].filter(one => one.complete && !one.naturalWidth).map(one => one.src)"
        assert seen.tab.evaluate(broken) == []
        assert seen.tab.evaluate("document.documentElement.scrollWidth") <= width, page
        found = Axe().run(seen.tab)
        assert found.violations_count == 0, f"{page}\n{found.generate_report()}"
    seen.close()


def test_the_search_finds_a_name(address: str, browser: Any) -> None:  # noqa: F811
    seen = Seen(browser, address, viewport={"width": 1280, "height": 900})
    seen.tab.goto(address)
    seen.tab.keyboard.press("/")
    seen.tab.keyboard.type("on_lease_loss")
    expect(seen.tab.locator("a[href*='options']").last).to_be_visible()
    seen.close()
