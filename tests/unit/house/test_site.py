"""The site: built from the same pages, searchable, and refused with a dead link."""

import functools
import http.server
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.site_pages import PAGES, on_page_markdown
from tests.helpers.browser import CHROMIUM, Browser
from tests.helpers.programs import ROOT

pytestmark = pytest.mark.second

GENERATED = {"reference/flags.md", "reference/messages.md"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


class Silent(http.server.SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def articles(site: Path) -> dict[str, str]:
    """Return the part of each page between navigation and footer."""
    found = {page.relative_to(site).as_posix(): page.read_text() for page in site.rglob("*.html")}
    return {name: text[text.find("<article") : text.find("</article>")] for name, text in found.items()}


def test_every_page_is_in_the_navigation() -> None:
    """Except decisions, which have a page of links, and the log."""
    nav = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1])
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    pages = {page for page in pages if not page.startswith(("decisions/", "log/"))}
    assert len(nav) == len({*nav}) and {*nav} == pages | GENERATED | {*PAGES.values()}
    assert nav[0] == "index.md"


def test_a_link_to_no_file_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Warnings fail a strict build; mkdocs reports those within docs/ itself."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri="results/plans.md"))
    text = "[a](../../megazero/host.py) [b](../plan.md#curves) [c](https://pytorch.org) [d](../../megazero/gone.py)"
    with caplog.at_level(logging.WARNING, "mkdocs"):
        shown = on_page_markdown(text, page=page, config=None, files=None)
    assert "(../source/megazero/host.py.txt)" in shown and "(../plan.md#curves)" in shown
    assert [record.getMessage() for record in caplog.records] == [
        "results/plans.md: the link ../../megazero/gone.py leads to no file"
    ]


def test_lists_and_tables_are_rendered(site: Path) -> None:
    for name, text in articles(site).items():
        text = re.sub(r"<(pre|code)\b.*?</\1>|</?(?:a|strong|em)\b[^>]*>", "x", text, flags=re.DOTALL)
        paragraphs = re.findall(r"<(?:p|li)>(.*?)</", text, re.DOTALL)
        assert not [p for p in paragraphs if re.search(r"^\s*(?:[-*]|\d+\.) \S|^\|.*\||```", p, re.MULTILINE)], name


def test_what_github_marks_is_a_box_and_lines_are_whole(site: Path) -> None:
    start = (site / "index.html").read_text()
    (box,) = re.findall(r'<div class="admonition warning">(.*?)</div>', start, re.DOTALL)
    assert "Never run on a GPU" in box and "[!" not in start and "max-width: 80rem" in (site / "style.css").read_text()


def test_what_a_user_searches_is_found(site: Path) -> None:
    """A flag, a metric, a refusal and a term, each on its page."""
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    for text, page in (
        ("--zero-shard-size", "reference/flags.html"),
        ("samples_served", "metrics.html"),
        ("needs --vocab-size, the number of tokens to draw from", "reference/messages.html"),
        ("make a corpus with data_tools/preprocess_data.py, and give the", "reference/messages.html"),  # by a function
        ("gradients overflow at the smallest loss scale", "reference/messages.html"),  # a class of its own
        ("residual stream", "glossary.html"),
    ):
        plain = [re.sub(r"<[^>]+>|\\", "", entry["text"]) for entry in entries if entry["location"].startswith(page)]
        assert any(text in part for part in plain), text


def test_links_of_the_site_lead_to_its_files(site: Path) -> None:
    missing = set()
    for name, text in articles(site).items():
        if name == "404.html":
            continue
        for link in re.findall(r'(?:href|src)="([^"#:]+)(?:#[^"]*)?"', text):
            if not ((site / name).parent / link).exists():
                missing.add((name, link))
    assert not missing


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The site on a port of this machine."""
    handler = functools.partial(Silent, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.skipif(CHROMIUM is None, reason="not installed: chromium (apt-get install chromium fonts-dejavu-core)")
@pytest.mark.timeout(120)
def test_the_search_works_in_a_browser_without_another_host(address: str, tmp_path: Path) -> None:
    with Browser(tmp_path) as shown:
        shown.open(f"{address}index.html")
        found = shown.run(
            """new Promise(done => {
                 const results = document.querySelector(".md-search-result")
                 const look = () => results.innerText.includes("matching") && done(results.innerText)
                 new MutationObserver(look).observe(results, {childList: true, subtree: true, characterData: true})
                 const box = document.querySelector(".md-search__input")
                 document.querySelector("#__search").click()
                 box.focus()
                 box.value = "residual stream"
                 box.dispatchEvent(new KeyboardEvent("keyup"))
               })"""
        )
        assert "residual" in found.lower() and not found.startswith("No ")
        loaded = shown.run("performance.getEntriesByType('resource').map(entry => entry.name)")
        assert loaded and all(name.startswith(address) for name in loaded), loaded
        assert not shown.faults
