"""Hostile requests to a server of real processes, of which no client notices anything."""

import subprocess
import sys
from collections import Counter

import httpx
import pytest

from tests.api.test_hostile import attack, send_raw

MAX_STALL = 0.5  # seconds, of the run by hand
# In a process of its own: it must not wait for the clients' work. It prints the longest wait.
WATCHER = """
import sys, time, urllib.request
url, longest = sys.argv[1], 0.0
print("ready", flush=True)
while True:
    began = time.monotonic()
    urllib.request.urlopen(url + "/health", timeout=300).read()
    if time.monotonic() - began > longest:
        longest = time.monotonic() - began
        print(f"{longest:.3f}", flush=True)
    time.sleep(0.02)
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [120, pytest.param(25_000, marks=pytest.mark.slow)])
async def test_hostile_bodies_fail_no_request_and_stall_no_other(start, tmp_path, count):
    server = start("--executor", "fake", "--batch-dir", str(tmp_path / "batches"))
    command = [sys.executable, "-c", WATCHER, server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None and watcher.stdout.readline() == "ready\n"
        statuses = await attack(server.url, count, seed=count)
        num_raw = await send_raw(server.url, count // 10, seed=count)
        watcher.terminate()
        waits = [float(line) for line in watcher.stdout.read().splitlines()]
    by_status = Counter(status for _, status in statuses.elements())
    print(f"{count} bodies, {num_raw} raw answers, {dict(by_status)}")
    print(f"longest wait for /health: {waits[-1]} s")
    assert by_status[200] and by_status[400]
    # The short run has other tests beside it.
    assert waits[-1] < (MAX_STALL if count >= 25_000 else 10)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert answer.status_code == 200
