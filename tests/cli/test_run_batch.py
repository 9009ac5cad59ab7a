"""`servd run-batch` against a small server: connections that die, waits, ids that occur twice."""

import json
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from servd.base.errors import ConfigError
from servd.cli import main, run_batch
from servd.cli.run_batch import BatchRun
from servd.terminal import api_client
from servd.terminal.api_client import Client, seconds_of

COMPLETIONS = "/v1/completions"


class Handler(BaseHTTPRequestHandler):
    """Closes every connection unannounced after its first answer. The first request has to wait."""

    protocol_version = "HTTP/1.1"
    num_requests = 0

    def do_POST(self) -> None:
        Handler.num_requests += 1
        body = self.rfile.read(int(self.headers["content-length"]))
        if Handler.num_requests == 1:
            self.send_response(503)
            self.send_header("retry-after", formatdate(time.time() - 5, usegmt=True))
        else:
            self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


def no_server() -> Client:
    return Client("http://127.0.0.1:1")


def line(custom_id: str) -> str:
    return json.dumps({"custom_id": custom_id, "url": COMPLETIONS, "body": {"prompt": custom_id}})


def test_dropped_connections_are_reopened(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(line, "abcd")), encoding="utf8")
    try:
        assert BatchRun(source, results).run(lambda: Client(url), 1) == 0
    finally:
        server.shutdown()
        server.server_close()
    answers = [json.loads(text) for text in results.read_text(encoding="utf8").splitlines()]
    assert [answer["response"]["body"]["prompt"] for answer in answers] == [*"abcd"]


def test_the_summary_counts_what_this_run_did(tmp_path):
    class Echo:
        """Answers with a usage; refuses the prompt "bad"."""

        def ask(self, method, path, body):
            status = 400 if body["prompt"] == "bad" else 200
            usage = {"prompt_tokens": 3, "completion_tokens": 40}
            return api_client.ApiAnswer(status, "id", {"usage": usage} if status == 200 else {})

    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(line, ["a", "b"])), encoding="utf8")
    assert BatchRun(source, results).run(Echo, 1) == 0
    source.write_text("\n".join(map(line, ["a", "b", "c", "bad"])), encoding="utf8")
    batch = BatchRun(source, results)
    assert batch.run(Echo, 2) == 1
    summary = batch.summarise()
    for result_lines in (
        "requests: 2 in",
        "3 prompt tokens, 40 output tokens",
        "earlier run: 2",
        "failed: 1;",
    ):
        assert result_lines in summary


def test_an_unreachable_server_is_reported_per_line(tmp_path):
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a"), encoding="utf8")
    assert BatchRun(source, results).run(no_server, 1) == 1
    assert json.loads(results.read_text(encoding="utf8"))["error"]["code"] == "connection"


def test_a_refusal_that_is_kept_counts_as_a_failure_again(tmp_path):
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(line, "abc")), encoding="utf8")
    kept = [
        json.dumps({"custom_id": name, "response": {"status_code": code}, "error": None})
        for name, code in (("a", 200), ("b", 400), ("c", 404), ("of another batch", 400))
    ]
    results.write_text("\n".join(kept), encoding="utf8")
    assert BatchRun(source, results).run(no_server, concurrency=1) == 2
    assert results.read_text(encoding="utf8").splitlines() == kept


def test_retry_after_is_read_as_seconds_or_a_date(monkeypatch):
    monkeypatch.setattr(api_client.time, "time", lambda: 1_000_000_000.0)
    assert seconds_of("2") == 2 and seconds_of("0.5") == 0.5 and seconds_of("-1") == 0
    assert seconds_of("Sun, 09 Sep 2001 01:46:50 GMT") == 10
    assert seconds_of("Sun, 09 Sep 2001 01:46:30 GMT") == 0
    assert seconds_of("86400") == api_client.LONGEST_WAIT
    assert seconds_of(None) is seconds_of("soon") is seconds_of("nan") is None


def test_duplicate_ids_are_refused_with_their_line_numbers(tmp_path):
    source, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(["{", line("a"), "", line("b"), "[]", line("a")]), encoding="utf8")
    with pytest.raises(ConfigError, match="lines 2 and 6 have the same custom_id 'a'"):
        BatchRun(source, results)
    assert not results.exists()


@pytest.mark.parametrize("number", ["0", "-3"])
def test_without_concurrency_nothing_would_be_answered(tmp_path, number, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text(line("a"), encoding="utf8")
    with pytest.raises(SystemExit, match="2"):
        main(["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--concurrency", number])
    assert f"--concurrency {number}: give 1 or more" in capsys.readouterr().err


def test_the_files_are_checked_before_a_server_is_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        run_batch, "own_server", lambda options: pytest.fail("a server was started")
    )
    with pytest.raises(SystemExit, match="2"):
        main(["run-batch", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out")])
    assert "No such file" in capsys.readouterr().err


def test_lines_are_divided_at_line_feeds_alone():
    pieces = ['data: "a\u2028b"\n\nda'.encode(), b'ta: "c"\n']
    lines = [*api_client.split_lines(iter(pieces))]
    assert lines == ['data: "a\u2028b"'.encode(), b"", b'data: "c"', b""]
