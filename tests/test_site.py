"""The site builds without a warning, has every page, loads its own files alone, fits a phone."""

import re
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.console.conftest import Page, browser
from tests.limits import WAIT_SECONDS
from tools import site

ROOT = Path(__file__).resolve().parents[1]
BUILT = ROOT / "build/site"
MOST_VARIED = [
    "",
    "how-to/monitoring/",
    "how-to/console/",
    "reference/options/",
    "reference/compatibility/",
    "explanation/architecture/",
    "benchmarks/peers/",
    "repository/examples/tools.py/",
]
OVERFLOWING = """
const width = document.documentElement.clientWidth;
const clips = (e) => e && (getComputedStyle(e).overflowX != "visible" || clips(e.parentElement));
const wide = [...document.querySelectorAll("article *")].filter(
  (e) => e.getBoundingClientRect().right > width + 1 && !clips(e.parentElement));
const overflow = document.documentElement.scrollWidth - width;
return [overflow, wide.map((e) => e.outerHTML.slice(0, 200))];
"""
LOADED = "return performance.getEntriesByType('resource').map((entry) => entry.name)"


def test_the_navigation_has_four_kinds_of_pages():
    nav = site.read_navigation(site.INDEX.read_text(encoding="utf8"))
    assert [title for entry in nav for title in entry] == [
        "Start",
        "How to",
        "Reference",
        "Explanation",
        "Benchmarks",
    ]


@pytest.mark.parametrize(
    ("page", "text", "rewritten"),
    [
        ("README.md", "[a](../CONTRIBUTING.md#b)", "[a](repository/CONTRIBUTING.md#b)"),
        ("README.md", "[a](../examples)", "[a](repository/examples/index.md)"),
        (
            "how-to/tools.md",
            "[a](../../examples/tools.py)",
            "[a](../repository/examples/tools.py.md)",
        ),
        ("how-to/tools.md", "[a](lora.md#b), [c](#d)", "[a](lora.md#b), [c](#d)"),
        ("how-to/tools.md", "[a](https://example.com/b.md)", "[a](https://example.com/b.md)"),
        ("how-to/tools.md", "[a](missing.md)", "[a](missing.md)"),  # mkdocs reports it
        ("README.md", "```text\n[a](../examples)\n```", "```text\n[a](../examples)\n```"),
    ],
)
def test_links_are_rewritten(page, text, rewritten):
    assert site.rewrite_links(text, site.DOCS / page) == rewritten


def test_links_of_files_outside_docs_are_rewritten():
    contributing = site.write_outside_page(ROOT / "CONTRIBUTING.md")
    assert "](../explanation/structure.md)" in contributing


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The site, built and served."""
    result = subprocess.run(
        ["make", "site"], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    if result.returncode != 0 and not (ROOT / "build/site-tools/mermaid/mermaid.min.js").exists():
        pytest.skip(f"what builds the site could not be installed: {result.stderr[-300:]}")
    assert result.returncode == 0, result.stdout + result.stderr
    handler = partial(SimpleHTTPRequestHandler, directory=str(BUILT))
    handler.func.log_message = lambda *_: None  # type: ignore[attr-defined]
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_the_built_site_has_every_page_and_loads_nothing_from_elsewhere(url):
    pages = [path for path in site.DOCS.rglob("*.md") if path.name != "README.md"]
    names = [path.relative_to(site.DOCS).with_suffix("") / "index.html" for path in pages]
    assert [str(name) for name in names if not (BUILT / name).exists()] == []
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=\"(?:https?:)?//[^>]*>")
    loaded = {str(page): loads.findall(page.read_text()) for page in BUILT.rglob("*.html")}
    assert {page: tags for page, tags in loaded.items() if tags} == {}


@pytest.fixture(scope="module")
def page(url) -> Iterator[Page]:
    with browser(url) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("path", MOST_VARIED)
def test_a_page_fits_the_window_and_loads_its_own_files_alone(page: Page, url, path, width):
    page.emulate(width=width, height=900)
    page.driver.get(f"{url}/{path}")
    overflow, elements = page.run(OVERFLOWING)
    assert overflow <= 0 and elements == []
    assert [name for name in page.run(LOADED) if not name.startswith(url)] == []
    assert [entry for entry in page.driver.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.slow
def test_the_search_finds_a_flag(page: Page, url):
    page.emulate(width=1400)
    page.driver.get(url)
    page.wait(".md-search__input").send_keys("shutdown-timeout")
    page.wait(".md-search-result__item", "shutdown-timeout")


@pytest.mark.slow
def test_a_diagram_is_drawn_in_the_mode_of_the_reader(page: Page, url):
    page.emulate(width=1400, dark=True)
    page.driver.get(f"{url}/explanation/architecture/")
    page.wait("div.mermaid")  # its drawing is in a closed shadow root
    red, green, blue = re.findall(
        r"\d+", page.run("return getComputedStyle(document.body).backgroundColor")
    )[:3]
    assert max(int(red), int(green), int(blue)) < 80
