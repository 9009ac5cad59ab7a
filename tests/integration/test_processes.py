"""Life and death of the process tree, with real processes."""

import asyncio
import hashlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.adapters import write_adapter
from tests.integration.conftest import Server
from tests.limits import WAIT_SECONDS


async def open_streams(
    server: Server, count: int, max_tokens: int = 8000
) -> tuple[openai.AsyncOpenAI, list]:
    """Streams that have each delivered their first chunk with text."""
    client = server.client()
    model = (await client.models.list()).data[0].id

    async def open_stream(i: int):
        stream = await client.completions.create(
            model=model,
            prompt=f"stream {i}",
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.choices[0].text:
                return stream

    return client, await asyncio.gather(*(open_stream(i) for i in range(count)))


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def socket_folder(server: Server) -> Path:
    """Where the server's processes keep their sockets."""
    connections = psutil.Process(server.children()["engine"].pid).net_connections("unix")
    return next(Path(c.laddr).parent for c in connections if c.laddr.endswith("/engine"))


async def test_when_the_engine_may_not_restart_every_stream_gets_an_error(start):
    server = start("--executor", "fake", "--max-engine-restarts", "0")
    client, streams = await open_streams(server, 16)
    server.children()["engine"].kill()

    async def read(stream) -> None:
        with pytest.raises(openai.APIError, match="engine ended with code -9; it died more than 0"):
            async for _ in stream:
                pass

    await asyncio.gather(*(read(s) for s in streams))
    assert await asyncio.to_thread(server.process.wait, 30) == 1
    await client.close()


def complete(server: Server, **body: Any) -> dict[str, Any]:
    body = {"prompt": "once", "max_tokens": 300, "ignore_eos": True, **body}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return {key: answer.json()[key] for key in ("choices", "usage")}


@pytest.mark.parametrize(
    ("options", "signum"),
    [
        (["--executor", "uniproc"], signal.SIGKILL),
        (["--executor", "fake", "--engine-hang-timeout", "2"], signal.SIGSTOP),
        pytest.param(
            ["--executor", "multiproc", "--tensor-parallel-size", "2"],
            signal.SIGKILL,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["killed", "stopped", "worker killed"],
)
def test_answers_are_the_same_though_the_engine_dies(start, long_llama, options, signum):
    is_fake = "fake" in options
    model = [] if is_fake else [str(long_llama), "--device", "cpu"]
    length = 8000 if is_fake else 800  # so long that the engine dies before the end
    server = start(*model, *options)
    bodies = [
        {"temperature": 0, "logprobs": 1},
        {"seed": 5, "n": 2, "stop": ["zzzz"]},
        {"prompt": "twice", "temperature": 0.7, "seed": 1, "max_tokens": length},
    ]
    expected = [complete(server, **body) for body in bodies]
    with ThreadPoolExecutor() as pool:
        got = [pool.submit(complete, server, **body) for body in bodies]
        wait_until(lambda: server.metric("vllm:num_requests_running") > 0, "nothing runs")
        engine = server.children()["engine"]
        (engine.children() or [engine])[-1].send_signal(signum)
        server.wait_for_line("restarting it")
        if signum == signal.SIGSTOP:
            server.wait_for_line("in run_busy_loop")  # the stacks
        assert [future.result() for future in got] == expected
    server.wait_ready()
    assert not engine.is_running()
    server.wait_idle()


@pytest.mark.slow
def test_adapters_belong_to_an_engine_and_outlive_it_and_their_source(start, tiny_llama, tmp_path):
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {f"{module}.lora_A.weight": (4, 64), f"{module}.lora_B.weight": (64, 4)}
    source = write_adapter(tmp_path / "source", shapes=shapes)
    options = ("--device", "cpu", "--enable-lora", "--lora-modules", f"sql={source}")
    server = start(str(tiny_llama), *options, "--served-model-name", "tiny")
    body = {"temperature": 0, "max_tokens": 20}
    plain, expected = complete(server, **body), complete(server, **body, model="sql")
    assert plain["choices"] != expected["choices"]
    attached = start(str(tiny_llama), "--attach", str(socket_folder(server)), wait=False)
    assert attached.process.wait(WAIT_SECONDS) != 0, "an engine with adapters is another one"
    shutil.rmtree(source)
    server.children()["engine"].kill()
    server.wait_for_line("restarting it")
    assert complete(server, **body, model="sql")["choices"] == expected["choices"]


def test_an_api_server_that_dies_is_replaced_and_others_go_on(start):
    server = start("--executor", "fake", "--api-server-count", "2")
    engine = server.children()["engine"]
    server.children()["api"].kill()
    server.wait_for_line("api-. ended unexpectedly with code -9: restarting it")
    assert len(complete(server)["choices"]) == 1
    wait_until(
        lambda: sum("api.server" in " ".join(c.cmdline()) for c in processes(server)) == 2,
        "no other API server",
    )
    assert engine.is_running() and server.stop() == 0


def processes(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children()


def test_the_death_of_the_parent_ends_all(start):
    server = start("--executor", "fake")
    children = server.children()
    server.process.kill()
    assert server.process.wait(WAIT_SECONDS) != 0
    wait_until(lambda: not any(c.is_running() for c in children.values()), "orphans")


def test_a_signal_leaves_nothing(start):
    server = start("--executor", "fake")
    folder, children = socket_folder(server), server.children()
    assert folder.stat().st_mode & 0o777 == 0o700
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(WAIT_SECONDS) == 0
    assert not any(c.is_running() for c in children.values())
    assert not folder.exists()


async def test_sigterm_lets_open_requests_finish(start):
    server = start("--executor", "fake")
    client, (stream,) = await open_streams(server, 1)
    server.process.send_signal(signal.SIGTERM)
    reasons = [chunk.choices[0].finish_reason async for chunk in stream]
    assert reasons[-1] == "length"
    await client.close()
    assert server.stop() == 0


def test_a_background_response_ends_with_the_server(start):
    """When time is up."""
    server = start("--executor", "fake", "--shutdown-timeout", "0")
    body = {"input": "x", "background": True, "max_output_tokens": 8000, "ignore_eos": True}
    for _ in range(16):
        httpx.post(f"{server.url}/v1/responses", json=body).raise_for_status()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(WAIT_SECONDS) == 0
    log = "\n".join(server.lines)
    assert not re.search(r"Traceback|Error|the engine has ended|killed", log), log


async def test_drain_is_cut_with_an_error_when_time_is_up(start):
    server = start("--executor", "fake", "--shutdown-timeout", "0")
    client, streams = await open_streams(server, 8)
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass
    await client.close()
    assert server.stop() == 0


async def test_100_clients_that_leave_free_all_blocks(start):
    server = start("--executor", "fake", "--max-num-seqs", "128")
    client, streams = await open_streams(server, 100)
    assert server.metric("vllm:num_requests_running") > 0
    await asyncio.gather(*(stream.close() for stream in streams))
    await client.close()
    await asyncio.to_thread(server.wait_idle)
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_port_opens_before_the_model_is_ready(start, tiny_llama):
    server = start(str(tiny_llama), "--device", "cpu", wait=False)
    response = httpx.get(f"{server.url}/health", timeout=WAIT_SECONDS)
    assert response.status_code == 503
    assert response.json()["phase"]
    server.wait_ready()
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_api_process_is_small_and_without_torch(llama_server: Server):
    api = llama_server.children()["api"]
    maps = Path(f"/proc/{api.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert api.memory_info().rss < 120e6


def test_idle_costs_no_cpu(llama_server: Server):
    children = llama_server.children()
    before = {kind: sum(p.cpu_times()[:2]) for kind, p in children.items()}
    time.sleep(1)
    after = {kind: sum(p.cpu_times()[:2]) for kind, p in children.items()}
    # In fact 0.01 and 0.02; one that spins or polls would use the whole second, or much of it.
    assert after["engine"] - before["engine"] <= 0.1
    assert after["api"] - before["api"] <= 0.2


def test_two_engines_answer_as_one_though_one_of_them_dies(start, fake_server):
    bodies = [
        {"prompt": f"{i} upon a time", "temperature": i % 2, "seed": i, "max_tokens": 4000}
        for i in range(6)
    ]
    expected = [complete(fake_server, **body)["choices"] for body in bodies]
    server = start("--executor", "fake", "--data-parallel-size", "2", "--api-server-count", "2")
    assert [complete(server, **body)["choices"] for body in bodies] == expected
    engines = [
        child
        for child in psutil.Process(server.process.pid).children()
        if "engine_core_proc" in " ".join(child.cmdline())
    ]
    with ThreadPoolExecutor() as pool:
        got = [pool.submit(complete, server, **body) for body in bodies]
        wait_until(lambda: server.metric("vllm:num_requests_running") > 1, "nothing runs")
        engines[1].kill()
        assert [future.result()["choices"] for future in got] == expected
    wait_until(
        lambda: httpx.get(f"{server.url}/health").json()["engines"] == ["idle", "idle"],
        "an engine is missing",
    )
    assert engines[0].is_running()
    assert re.search("engine [01] ended with code -9: restarting it", "\n".join(server.lines))
    assert server.metric("servd:engine_restarts_total") == 1
    server.check_audit()


def test_headless_engine_serves_attached_api_servers(start, tmp_path: Path):
    folder = tmp_path / "ipc"
    limit = ["--max-engine-restarts", "1"]
    engine = start("--executor", "fake", "--headless", "--ipc-dir", str(folder), *limit)
    attached = start("--executor", "fake", "--attach", str(folder))
    assert complete(attached, max_tokens=3)["usage"]["completion_tokens"] == 3
    engine.children()["engine"].kill()
    engine.wait_for_line("restarting it")
    assert complete(attached, max_tokens=3)["usage"]["completion_tokens"] == 3
    engine.children()["engine"].kill()
    assert attached.process.wait(WAIT_SECONDS) == 1
    assert engine.process.wait(WAIT_SECONDS) == 1


async def test_a_killed_api_server_aborts_its_requests(start, tmp_path):
    folder = tmp_path / "ipc"
    patience = ["--engine-hang-timeout", "600"]
    engine = start("--executor", "fake", "--headless", "--ipc-dir", str(folder), *patience)
    limit = ["--max-engine-restarts", "0"]
    survivor, victim = (
        start("--executor", "fake", "--attach", str(folder), *limit) for _ in range(2)
    )
    clients, streams = zip(
        *[await open_streams(attached, 3) for attached in (survivor, victim)], strict=True
    )
    # The victim's streams, which last for a few seconds, must not end before it.
    engine.children()["engine"].suspend()
    victim.children()["api"].kill()
    assert await asyncio.to_thread(victim.process.wait, 60) != 0
    engine.children()["engine"].resume()
    engine.wait_for_line(r"an API server ended: aborted \d requests")
    for stream in streams[0]:  # the other one's go on to their ends
        reasons = [chunk.choices[0].finish_reason async for chunk in stream]
        assert reasons[-1] == "length" and reasons.count("length") == 1
    await asyncio.to_thread(survivor.wait_idle)
    for client in clients:
        await client.close()
    assert engine.process.poll() is None


def test_unix_socket(start, tmp_path: Path):
    path = tmp_path / "servd.sock"
    server = start("--executor", "fake", "--uds", str(path))
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(path)), base_url="http://servd", timeout=WAIT_SECONDS
    ) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "fake"
    assert server.stop() == 0
    assert not path.exists()


def test_hang_up_has_keys_and_log_level_read_again(start, tmp_path: Path):
    keys, options = tmp_path / "keys.toml", tmp_path / "servd.toml"

    def write_key(secret: str) -> None:
        hashed = hashlib.sha256(secret.encode()).hexdigest()
        keys.write_text(f'[[keys]]\nname = "a"\nsha256 = "{hashed}"\n')

    def status(secret: str) -> int:
        headers = {"authorization": f"Bearer {secret}"}
        return httpx.get(f"{server.url}/version", headers=headers, timeout=WAIT_SECONDS).status_code

    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, server.lines
            time.sleep(0.02)

    write_key("old")
    options.write_text('log-level = "info"\n')
    # A session of its own: with a terminal, its hang-up would end the server. Who runs the tests
    # may ignore the signal (nohup), and children would, too.
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    server = start(
        "--executor",
        "fake",
        "--config",
        str(options),
        "--api-key-file",
        str(keys),
        "--api-server-count",
        "2",
        new_session=True,
    )
    signal.signal(signal.SIGHUP, ignored)
    assert (status("old"), status("new")) == (200, 401)
    write_key("new")
    options.write_text('log-level = "error"\n')
    server.process.send_signal(signal.SIGHUP)
    # Two processes answer, whichever takes the connection.
    until(lambda: [status("old") for _ in range(8)] == [401] * 8)
    until(lambda: [status("new") for _ in range(8)] == [200] * 8)
    keys.write_text("[[")
    server.process.send_signal(signal.SIGHUP)
    server.wait_for_line("SIGHUP: --api-key-file .*nothing changed")
    assert status("new") == 200
    # Not one line of info since: the engine and both API servers know the level, too.
    num_lines = len(server.lines)
    assert server.stop() == 0
    assert [line for line in server.lines[num_lines:] if " INFO " in line] == []


def test_configuration_errors_are_one_line_and_exit_code_2(tmp_path: Path, tiny_llama):
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    config = dict.fromkeys((*sizes, "max_position_embeddings"), 8)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of", **config}))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        cases = {
            r"no file for model_type 'unheard_of'": [str(tmp_path), "--model-impl", "servd"],
            rf"cannot listen on 127.0.0.1:{port}.*--port": ["--executor", "fake", "--port", port],
            r"KV cache": [str(tiny_llama), "--device", "cpu", "--kv-cache-memory", "4KiB"],
        }
        for pattern, args in cases.items():
            command = [sys.executable, "-m", "servd", "serve", *args]
            result = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
            lines = result.stderr.splitlines()
            errors = [line for line in lines if line.startswith("servd: error: ")]
            assert len(errors) == 1, result.stderr
            assert re.search(pattern, errors[0]), errors
            assert result.returncode == 2
            assert "Traceback" not in result.stderr
    assert "Traceback" not in result.stderr
