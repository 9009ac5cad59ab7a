"""docs/how-to/disaggregated.md, as a reader runs it: two servers and a proxy."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.api.harness import output_text
from tests.integration.conftest import Server
from tests.limits import WAIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/disaggregated.md").read_text()
TEXT = "a long beginning of a text, of several blocks " * 3


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def post(url: str, **body) -> dict:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": TEXT, "max_tokens": 24} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_example_of_the_page(monkeypatch):
    monkeypatch.setenv("SERVD_JOIN_TOKEN", "0123456789abcdef" * 2)
    configs = re.findall(r"servd serve MODEL .*--kv-transfer-config '(.*)'$", PAGE, re.MULTILINE)
    port, side_port = str(free_port()), str(free_port())
    prefill, decode = (
        # The fake model computes faster than anything could be had: blocks must come all the same.
        json.dumps(json.loads(config.replace("14579", port)) | {"kv_load_failure_policy": "fail"})
        for config in configs
    )
    options = ("--executor", "fake", "--block-size", "4", "--kv-transfer-config")
    servers = [Server(*options, config) for config in (prefill, decode)]
    proxy = None
    try:
        for server in servers:
            server.wait_ready()
        urls = [server.url for server in servers]
        script = ROOT / "examples/disaggregated_proxy.py"
        proxy = subprocess.Popen([sys.executable, script, *urls, side_port], env={**os.environ})
        url, deadline = f"http://127.0.0.1:{side_port}", time.monotonic() + WAIT_SECONDS
        while True:
            try:
                answer = post(url)
                break
            except httpx.ConnectError:
                assert proxy.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
        assert answer["choices"][0]["text"] == output_text(TEXT, 24)
        num_cached = (len(TEXT) - 1) // 4 * 4
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached
        assert servers[1].metric("vllm:external_prefix_cache_hits_total") == num_cached
        streamed = httpx.post(
            f"{url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": TEXT}], "stream": True, "max_tokens": 8},
        )
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert servers[1].metric("vllm:external_prefix_cache_hits_total") > 2 * num_cached
        for server in servers:
            server.check_audit()
        first = {"max_tokens": 1, "prompt": "x" + TEXT}
        params = post(urls[0], **first, kv_transfer_params={"do_remote_decode": True})
        servers[0].process.kill()
        servers[0].process.wait()
        while is_open(int(port)):  # its engine ends a moment later
            time.sleep(0.05)
        body = {"prompt": "x" + TEXT, "kv_transfer_params": params["kv_transfer_params"]}
        lost = httpx.post(f"{urls[1]}/v1/completions", json=body)
        assert lost.status_code == 500 and "KV blocks could not be had" in lost.text
        answer = post(url, prompt="y" + TEXT)  # the second server does it all
        assert answer["choices"][0]["text"] == output_text("y" + TEXT, 24)
        servers[1].check_audit()
    finally:
        if proxy is not None:
            proxy.kill()
            proxy.wait()
        for server in servers:
            server.stop()
