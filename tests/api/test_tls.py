"""TLS, certificates of clients, and their renewal; pages of other origins."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from servd.base.errors import ConfigError
from servd.config import AccessConfig, Config
from servd.config.keys import load_certificates, tls_context
from tests.api.harness import MODEL, listening, serve, user
from tests.limits import WAIT_SECONDS


def write(certificate: trustme.LeafCert, folder: Path) -> dict[str, str]:
    """The options of a server with this certificate."""
    folder.mkdir(exist_ok=True)
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    for i, pem in enumerate(certificate.cert_chain_pems):
        pem.write_to_path(folder / "cert.pem", append=i > 0)
    return {"ssl_certfile": f"{folder}/cert.pem", "ssl_keyfile": f"{folder}/key.pem"}


def client(ca: trustme.CA, certificate: trustme.LeafCert | None = None) -> httpx.AsyncClient:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    if certificate is not None:
        certificate.configure_cert(context)
    return httpx.AsyncClient(verify=context, timeout=WAIT_SECONDS)


@asynccontextmanager
async def https(context: ssl.SSLContext | None) -> AsyncIterator[str]:
    async with serve() as served, listening(served.app, tls=context) as url:
        yield url.replace("http://", "https://").replace("127.0.0.1", "localhost")


async def test_a_stream_over_tls_and_a_refusal_before_the_application(tmp_path: Path):
    ca = trustme.CA()
    options = write(ca.issue_cert("localhost"), tmp_path)
    async with https(tls_context(AccessConfig(**options))) as url, client(ca) as http:
        body = {"model": MODEL, "messages": user("hi"), "max_tokens": 3, "stream": True}
        answer = await http.post(f"{url}/v1/chat/completions", json=body)
        assert answer.text.endswith("data: [DONE]\n\n")
        answer = await http.get(f"{url}/health", headers={"x": "y" * 200_000})
        assert answer.status_code == 431
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(url.replace("https", "http"))


async def test_only_clients_with_a_certificate_get_in(tmp_path: Path):
    ca, stranger = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    options: dict[str, Any] = write(ca.issue_cert("localhost"), tmp_path)
    options |= {"ssl_ca_certs": str(tmp_path / "ca.pem"), "ssl_cert_reqs": 2}
    async with https(tls_context(AccessConfig(**options))) as url:
        async with client(ca, ca.issue_cert("me@example.com")) as http:
            assert (await http.get(f"{url}/health")).status_code == 200
        for certificate in (None, stranger.issue_cert("me@example.com")):
            async with client(ca, certificate) as http:
                with pytest.raises(httpx.TransportError):
                    await http.get(f"{url}/health")


async def test_a_new_certificate_counts_for_new_connections_and_cuts_none(tmp_path: Path):
    old, new = trustme.CA(), trustme.CA()
    access = AccessConfig(**write(old.issue_cert("localhost"), tmp_path))
    context = tls_context(access)
    assert context is not None
    async with https(context) as url, client(old) as connected, client(new) as newcomer:
        assert (await connected.get(f"{url}/health")).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await newcomer.get(f"{url}/health")
        write(new.issue_cert("localhost"), tmp_path)
        load_certificates(context, access)
        assert (await newcomer.get(f"{url}/health")).status_code == 200
        # Over the connection of before: its authority could not make another one.
        assert (await connected.get(f"{url}/health")).status_code == 200
        async with client(old) as late:
            with pytest.raises(httpx.ConnectError):
                await late.get(f"{url}/health")


async def test_a_certificate_that_comes_before_its_key_changes_nothing(tmp_path: Path):
    ca = trustme.CA()
    access = AccessConfig(**write(ca.issue_cert("localhost"), tmp_path))
    context = tls_context(access)
    assert context is not None
    new = write(ca.issue_cert("localhost"), tmp_path / "new")
    Path(new["ssl_certfile"]).rename(str(access.ssl_certfile))
    with pytest.raises(ConfigError, match="mismatch"):
        load_certificates(context, access)
    async with https(context) as url, client(ca) as http:
        assert (await http.get(f"{url}/health")).status_code == 200


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ssl_keyfile": "key.pem"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_cert_reqs": 2, "ssl_certfile": "c"}, "--ssl-cert-reqs needs --ssl-ca-certs"),
        ({"ssl_certfile": "nowhere.pem"}, "nowhere.pem: No such file"),
        ({"ssl_certfile": __file__}, r"test_tls\.py: .*PEM private key.* --ssl-keyfile"),
        ({"ssl_certfile": "c", "ssl_ciphers": "ROT13"}, "--ssl-ciphers ROT13: OpenSSL has none"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(options: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        tls_context(AccessConfig(**options))


# ---- pages of other origins ----

PREFLIGHT = {
    "origin": "https://chat.example.com",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


async def test_pages_of_other_origins_get_nothing_by_default():
    async with serve() as served:
        asked = await served.http.options("/v1/chat/completions", headers=PREFLIGHT)
        answer = await served.http.get("/v1/models", headers={"origin": PREFLIGHT["origin"]})
    for each in (asked, answer):
        assert not [name for name in each.headers if name.startswith("access-control")]
    assert asked.status_code == 405


async def test_an_allowed_origin_may_ask_without_a_key_and_read_errors():
    async with serve(allowed_origins=[PREFLIGHT["origin"]], api_key=["k"]) as served:
        asked = await served.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PREFLIGHT["origin"]
        refused = await served.http.get("/v1/models", headers={"origin": PREFLIGHT["origin"]})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PREFLIGHT["origin"]
        readable = refused.headers["access-control-expose-headers"].split(", ")
        assert "x-ratelimit-remaining-requests" in readable and "retry-after" in readable
        other = PREFLIGHT | {"origin": "https://evil.example.com"}
        asked = await served.http.options("/v1/chat/completions", headers=other)
        assert asked.status_code == 400
        assert "access-control-allow-origin" not in asked.headers


def test_origins_in_vllms_json_are_not_taken_for_a_name():
    config = Config.load({"allowed_origins": ['["https://a.example", "*"]']})
    assert config.access.allowed_origins == ["https://a.example", "*"]
    with pytest.raises(ConfigError, match="--allowed-origins"):
        Config.load({"allowed_origins": ['["*"', "]"]})
