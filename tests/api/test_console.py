"""The console as it is served; tests/console/ has what a browser does with it."""

import re
from pathlib import Path

import httpx
import pytest

from servd.api.console import FOLDER, files
from servd.api.request.latency import OWN_WORK, PHASES
from servd.config import flag_of, options_by_name
from tests.api.harness import MODEL, serve

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
SOURCES = sorted(path for path in FOLDER.rglob("*") if path.suffix in (".js", ".css", ".html"))
DOCS = Path(__file__).parents[2] / "docs"
WAYS_TO_MARKUP = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|Function\("
)


async def test_a_browser_gets_the_page_and_a_program_the_paths(http: httpx.AsyncClient):
    page = await http.get("/", headers=BROWSER)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for program in ({}, {"accept": "application/json"}):
        answer = await http.get("/", headers=program)
        assert answer.json()["server"] == "servd"
        for path in ("models", "openapi", "docs", "health", "metrics"):
            assert (await http.get(answer.json()[path])).status_code == 200
        assert "Accept" in answer.headers["vary"]
    assert (await http.head("/", headers=BROWSER)).status_code == 200


async def test_the_page_needs_nothing_but_its_own_files(http: httpx.AsyncClient):
    page = (await http.get("/", headers=BROWSER)).text
    links = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert {"console/app.js", "console/style.css", "console/playground.js"} <= set(links)
    for path in links:
        answer = await http.get(f"/{path}")
        assert answer.status_code == 200, path
        assert answer.headers["x-content-type-options"] == "nosniff"
    for path, file in files().items():
        from_elsewhere = re.sub(rb"http://www.w3.org/2000/svg", b"", file.content)
        assert b"http://" not in from_elsewhere and b"https://" not in from_elsewhere, path
    assert sum(len(file.content) for file in files().values()) <= 200_000


async def test_the_content_security_policy_forbids_everything_else(http: httpx.AsyncClient):
    page = await http.get("/", headers=BROWSER)
    policy = page.headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.pop("default-src") == "'none'" and rules.pop("script-src") == "'self'"
    assert "unsafe" not in str(rules) and "*" not in str(rules)
    assert not re.search(r"<script>|<style>| style=| on\w+=", page.text)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_script_makes_markup_of_text_or_keeps_a_key(path):
    text = path.read_text(encoding="utf8")
    assert not re.search(WAYS_TO_MARKUP, text)
    assert not re.search(r"sessionStorage|indexedDB|document\.cookie", text)
    assert "localStorage" not in text or path.name in ("conversations.js", "settings.js")
    assert max(map(len, text.splitlines())) <= 100


def test_every_cause_has_a_name_for_people():
    text = (FOLDER / "timeline.js").read_text(encoding="utf8")
    assert {*re.findall(r"(\w+): \"[A-Z]", text)} == {*PHASES}


def test_every_wait_has_a_remedy_whose_flags_and_page_exist():
    text = (FOLDER / "remedies.js").read_text(encoding="utf8")
    assert {*re.findall(r"^  (\w+): \[", text, re.M)} >= {*PHASES} - OWN_WORK
    assert {*re.findall(r"--[a-z-]+[a-z]", text)} <= {*map(flag_of, options_by_name())}
    for remedy, page in re.findall(r'\["(.*?)",\s+"([a-z-]+\.md)"\]', text):
        guide = (DOCS / "how-to" / page).read_text(encoding="utf8")
        for flag in re.findall(r"--[a-z-]+[a-z]", remedy):
            assert flag in guide, f"{page} does not explain: {remedy}"


async def test_a_file_that_the_browser_has_is_not_sent_again(http: httpx.AsyncClient):
    first = await http.get("/console/app.js")
    again = await http.get("/console/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert first.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("name", ["__init__.py", "nothing.js", "../app.py", "%2e%2e/app.py", ""])
async def test_no_other_file_is_served(http: httpx.AsyncClient, name: str):
    assert (await http.get(f"/console/{name}")).status_code == 404


async def test_the_page_opens_without_a_key_and_says_nothing_of_the_server():
    async with serve(api_key=["key"]) as served:
        page = await served.http.get("/", headers=BROWSER)
        paths = (await served.http.get("/")).text
        assert page.status_code == 200 and MODEL not in page.text + paths
        assert (await served.http.get("/console/app.js")).status_code == 200
        for path in ("/console/", "/console/x.js", "/console/__init__.py", "/v1/models"):
            assert (await served.http.get(path, headers=BROWSER)).status_code == 401


async def test_the_console_can_be_left_out():
    async with serve(console=False, api_key=["key"]) as served:
        assert (await served.http.get("/", headers=BROWSER)).json()["server"] == "servd"
        assert (await served.http.get("/console/app.js")).status_code == 401
        key = {"x-api-key": "key", **BROWSER}
        assert (await served.http.get("/console/app.js", headers=key)).status_code == 404
