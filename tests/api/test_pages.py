"""Pages of other sites, in browsers that can reach the server."""

import socket
from typing import Any

import httpx
import pytest

from servd.base.errors import ConfigError
from servd.config import Config
from tests.api.harness import serve
from tests.api.test_gateway import gateway

BODY = {"prompt": "a", "max_tokens": 1}
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
FOREIGN += ["[2001:db8::1]:8000", "192.168.1.5", "0x7f.1", "evil.local"]
OWN = ["localhost", "LOCALHOST:1", "localhost.", "a.localhost", "127.0.0.1:8000", "127.8.9.1"]
OWN += ["[::1]:8000", "server:8000", socket.gethostname(), f"{socket.gethostname()}.local:80"]


async def status_of(http: httpx.AsyncClient, host: str, **options: Any) -> int:
    headers = {"host": host, **options.pop("headers", {})}
    options = {"method": "POST", "url": "/v1/completions", "json": BODY, **options}
    return (await http.request(**options, headers=headers)).status_code


async def test_a_rebound_name_reaches_no_server_on_a_loopback_address():
    async with serve(listen=True) as served:
        for host in FOREIGN:
            assert await status_of(served.http, host) == 421, host
            assert await status_of(served.http, host, method="GET", url="/health", json=None) == 421
        for host in OWN:
            assert await status_of(served.http, host) == 200, host
        answer = await served.http.get("/v1/models", headers={"host": "llm.example.com"})
    message = answer.json()["error"]["message"]
    assert "--allowed-hosts llm.example.com" in message and "'llm.example.com'" in message


@pytest.mark.parametrize(
    "options", [{"api_key": ["k"]}, {"host": "0.0.0.0"}, {"host": "::"}, {"uds": "/tmp/x"}]
)
async def test_by_default_other_servers_take_any_name(options):
    async with serve(listen=True, **options) as served:
        headers = {"x-api-key": "k"}
        assert await status_of(served.http, "evil.example", headers=headers) == 200


@pytest.mark.parametrize(
    ("allowed", "status"),
    [
        (["llm.example.com"], {"llm.example.com:8443": 200, "LLM.example.com": 200, "a.b": 421}),
        (["*.example.com"], {"a.example.com": 200, "b.a.example.com": 200, "example.com": 421}),
        (["*"], {"anything": 200, "": 200}),
        (["LLM.example.com.:8443"], {"llm.example.com": 200, "LLM.example.com.:9": 200}),
        (["[2001:DB8::1]:80", "2001:db8::2"], {"[2001:db8::1]": 200, "[2001:db8::2]:8": 200}),
        (["a", "b"], {"a": 200, "b": 200, "c": 421, "127.0.0.1": 200, "localhost": 200}),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_allowed_hosts_are_the_only_ones_beside_the_machine_s_own(allowed, status, host):
    async with serve(listen=True, allowed_hosts=allowed, host=host) as served:
        statuses = {name: await status_of(served.http, name) for name in status}
    assert statuses == status


@pytest.mark.parametrize("host", ["127.1", "localhost", "0x7f.1", "::1", "::ffff:127.0.0.1"])
async def test_every_way_to_write_a_loopback_address_is_one(host: str):
    async with serve(listen=True, host=host) as served:
        assert await status_of(served.http, "evil.example") == 421
        assert await status_of(served.http, "[::ffff:127.0.0.1]:8000") == 200


@pytest.mark.parametrize("host", ["a,b", "http://a", "a b", "münchen.example", "a.*", "*a", ""])
def test_hosts_that_match_no_name_are_refused(host: str):
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        Config.load({"allowed_hosts": [host]})


PAGE = "http://evil.example"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": PAGE}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "app://evil"}, 403),
        ({"origin": "https://localhost:1"}, 403),
        ({"origin": PAGE, "sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://localhost:8000"}, 200),
        ({"origin": "HTTP://LOCALHOST:8000"}, 200),
        ({"origin": "https://localhost:8000"}, 200),  # behind TLS
        ({"origin": "https://chat.example.com", "sec-fetch-site": "same-origin"}, 200),
        ({}, 200),
    ],
)
async def test_only_own_pages_send_what_changes_something(headers, status):
    async with serve(listen=True) as served:
        host = "localhost:8000"
        assert await status_of(served.http, host, headers=headers) == status
        url = "/reset_prefix_cache"
        assert await status_of(served.http, host, headers=headers, url=url, json=None) == status
        options = {"headers": headers, "json": None, "url": "/version"}
        assert await status_of(served.http, host, method="GET", **options) == 200


async def test_the_gateway_guards_its_models(tmp_path):
    async with gateway(tmp_path, "one", allowed_origins=["https://chat.example.com"]) as (http, _):
        body = {**BODY, "model": "one"}
        assert await status_of(http, "evil.example", json=body) == 421
        for origin, status in ((PAGE, 403), ("https://chat.example.com", 200)):
            headers = {"origin": origin}
            assert await status_of(http, "localhost", json=body, headers=headers) == status


async def test_the_gateway_s_names_are_not_those_of_its_models(tmp_path):
    async with gateway(tmp_path, "one", allowed_hosts=["llm.example.com"]) as (http, _):
        body = {**BODY, "model": "one"}
        assert await status_of(http, "llm.example.com", json=body) == 200
        assert await status_of(http, "other.example.com", json=body) == 421


# ---- allowed origins ----

ORIGINS = ["https://chat.example.com", "http://localhost:*", "app://obsidian.md", "null"]
ORIGINS += ["chrome-extension://abc", "tauri://localhost", "capacitor://localhost"]
ORIGINS += ["vscode-webview://abc", "moz-extension://a-b"]
PAGES = {origin: origin.replace(":*", ":5174") for origin in ORIGINS}
PAGES |= {"HTTPS://Chat.example.com:443": "https://chat.example.com"}
PAGES |= {"http://localhost:80": "http://localhost", "app://Obsidian": "app://Obsidian"}


@pytest.mark.parametrize(("origin", "page"), PAGES.items())
async def test_pages_apps_and_extensions_can_be_allowed(origin: str, page: str):
    preflight = {
        "origin": page,
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    async with serve(allowed_origins=[origin]) as served:
        reply = await served.http.options("/v1/completions", headers=preflight)
        assert reply.status_code == 200, reply.text
        assert reply.headers["access-control-allow-origin"] == page
        assert reply.headers["access-control-allow-private-network"] == "true"
        headers = {"origin": page, "sec-fetch-site": "cross-site"}
        answer = await served.http.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == page
        for other in (f"{page}x", f"x{page}", "https://chat-example.com", "http://localhost:5x"):
            reply = await served.http.options(
                "/v1/completions", headers={**preflight, "origin": other}
            )
            assert reply.status_code == 400, other
            headers = {"origin": other}
            answer = await served.http.post("/v1/completions", json=BODY, headers=headers)
            assert answer.status_code == 403


async def test_a_wildcard_allows_every_page_but_no_private_network():
    headers = {"origin": PAGE, "access-control-request-method": "POST"}
    async with serve(allowed_origins=["*"]) as served:
        reply = await served.http.options("/v1/completions", headers=headers)
        assert reply.status_code == 200
        answer = await served.http.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
        headers["access-control-request-private-network"] = "true"
        reply = await served.http.options("/v1/completions", headers=headers)
        assert reply.status_code == 400


@pytest.mark.parametrize(
    "origin", ["localhost", "http://*", "http://a.b/c", "http://*:80", "", "a b", "http://ü"]
)
def test_origins_that_match_no_page_are_refused(origin: str):
    with pytest.raises(ConfigError, match="--allowed-origins"):
        Config.load({"allowed_origins": [origin]})
