"""Bodies that clients compress or mark, and answers to HTTP/1.0."""

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest

from servd.api.http.middleware import MAX_BODY
from servd.api.protocol.batch_file import lines_of, read_line
from tests.api.harness import serve
from tests.api.test_gateway import gateway

BODY = {"prompt": "a" * 5000, "max_tokens": 1}
DATA = json.dumps(BODY).encode()


def deflate(data: bytes, bits: int = 15) -> bytes:
    packer = zlib.compressobj(wbits=bits)
    return packer.compress(data) + packer.flush()


async def post(http: Any, data: bytes, coding: str | None = None, **more: str) -> Any:
    headers = {"content-type": "application/json", **more}
    if coding is not None:
        headers["content-encoding"] = coding
    return await http.post("/v1/completions", content=data, headers=headers)


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", gzip.compress(DATA)),
        ("GZIP", gzip.compress(DATA)),
        ("gzip", gzip.compress(DATA[:99]) + gzip.compress(DATA[99:]) + bytes(10)),
        ("x-gzip", gzip.compress(DATA)),
        ("deflate", deflate(DATA)),
        ("deflate", deflate(DATA, -15)),
        ("identity", DATA),
        ("", DATA),
        (None, b"\xef\xbb\xbf" + DATA),
        ("gzip", gzip.compress(b"\xef\xbb\xbf" + DATA)),
    ],
)
async def test_compressed_and_marked_bodies_are_read(coding, data, tmp_path):
    async with serve(listen=True, max_model_len=8192) as served:
        answer = await post(served.http, data, coding)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == 5000


async def test_the_gateway_reads_them_too(tmp_path):
    body = json.dumps({"model": "two", "prompt": "abc", "max_tokens": 1}).encode()
    async with gateway(tmp_path, "one", "two") as (http, servers):
        for coding, data in (("gzip", gzip.compress(body)), (None, b"\xef\xbb\xbf" + body)):
            answer = await post(http, data, coding)
            assert answer.status_code == 200 and answer.json()["model"] == "two", answer.text
        assert servers.launched == ["two"]


@pytest.mark.parametrize("coding", ["zstd", "br", "compress", "gzip, gzip", "nonsense"])
async def test_other_codings_are_refused_with_those_that_work(coding):
    async with serve(listen=True) as served:
        answer = await post(served.http, gzip.compress(DATA), coding)
    assert answer.status_code == 415 and "gzip" in answer.headers["accept-encoding"]
    assert coding in answer.json()["error"]["message"]


@pytest.mark.parametrize("make", [gzip.compress, deflate])
async def test_a_bomb_is_refused_while_it_is_decoded(make, monkeypatch):
    coding = "gzip" if make is gzip.compress else "deflate"
    async with serve(listen=True) as served:
        answer = await post(served.http, make(bytes(4 * MAX_BODY)), coding)
        assert answer.status_code == 413, answer.text
        assert (await post(served.http, make(DATA), coding)).status_code in (200, 400)


@pytest.mark.parametrize(
    "data",
    [
        DATA,
        gzip.compress(DATA)[:-4],
        gzip.compress(DATA)[:30],
        gzip.compress(DATA) + b"more",
        gzip.compress(DATA)[:40] + b"\xff" * 40,
    ],
)
async def test_damaged_data_is_the_clients_error(data):
    async with serve(listen=True) as served:
        answer = await post(served.http, data, "gzip")
        assert answer.status_code == 400 and "gzip" in answer.json()["error"]["message"]


FLOODS = {
    "empty members": ("gzip", gzip.compress(b"") * 10_000),
    "tiny members": ("gzip", gzip.compress(b" ") * 10_000),
    "small members": ("gzip", gzip.compress(b" " * 30) * 100_000),
    "padding": ("gzip", bytes(200_000)),
    "a long file name": ("gzip", b"\x1f\x8b\x08\x08" + bytes(6) + b"a" * 200_000),
    "empty blocks": ("deflate", b"\x00\x00\x00\xff\xff" * 40_000),
}


@pytest.mark.parametrize(("coding", "flood"), FLOODS.values(), ids=FLOODS)
async def test_what_decodes_to_nothing_is_refused(coding, flood):
    async with serve(listen=True) as served:
        answer = await post(served.http, flood, coding)
        assert answer.status_code == 400 and "as a whole" in answer.json()["error"]["message"]


async def test_many_members_and_bytes_that_are_only_stored_are_read():
    async with serve(listen=True, max_model_len=8192) as served:
        members = gzip.compress(b" " * 2000) * 6000 + gzip.compress(DATA)
        assert (await post(served.http, members, "gzip")).status_code == 200
        stored = zlib.compress(DATA + b" " * 3_000_000, 0)
        assert (await post(served.http, stored, "deflate")).status_code == 200


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
async def test_other_encodings_are_named(encoding):
    async with serve() as served:
        answer = await post(served.http, json.dumps({"prompt": "a"}).encode(encoding))
        assert answer.status_code == 400 and "send UTF-8" in answer.json()["error"]["message"]


def test_a_batch_file_may_begin_with_a_mark(tmp_path):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY}
    file = tmp_path / "batch.jsonl"
    file.write_text(f"{json.dumps(line)}\r\n\r\n{json.dumps(line)}\n", encoding="utf-8-sig")
    assert [read_line(text).custom_id for _, text in lines_of(file)] == ["a", "a"]


# ---- HTTP/1.0 ----

STREAMS = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 3}},
}


async def ask(url: str, path: str, body: dict[str, Any], version: str, more: str = "") -> bytes:
    """All that the server sends until it closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps({"model": "fake", **body}).encode()
    head = f"POST {path} HTTP/{version}\r\nContent-Type: application/json\r\n{more}"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_to_http_1_0_ends_with_the_connection(path):
    async with serve(listen=True) as served:
        body = {**STREAMS[path], "stream": True}
        for more in ("", "Connection: keep-alive\r\n"):
            answer = await ask(served.url, path, body, "1.0", more)
            head, _, text = answer.partition(b"\r\n\r\n")
            assert b" 200 " in head and b"transfer-encoding" not in head.lower()
            assert b"connection: close" in head.lower()
            assert text.startswith((b"data: ", b"event: ", b"{")) and text.endswith(b"\n")
        whole = await ask(served.url, path, {**STREAMS[path], "stream": False}, "1.0")
        head, _, text = whole.partition(b"\r\n\r\n")
        assert f"content-length: {len(text)}".encode() in head.lower()
        chunked = await ask(served.url, path, body, "1.1", "Host: a\r\nConnection: close\r\n")
        assert b"transfer-encoding: chunked" in chunked.lower()
