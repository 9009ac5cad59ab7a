"""A Hugging Face hub with one model, org/name: the files of a folder."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

COMMIT = "a" * 40


class Gate(threading.Event):
    """Set while weights are sent."""

    num_bytes = 0  # of weights that were sent


@contextmanager
def hub(folder: Path, opens: Gate) -> Iterator[str]:
    """Serve the files of `folder`, weights once `opens` is set. Yield the URL for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            headers = {"x-repo-commit": COMMIT}
            content = b"{}"
            status = 200
            contents = {file.name: file.read_bytes() for file in folder.iterdir()}
            if path.startswith("/api/models/org/name/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": "b" * 40}
                    for name, data in contents.items()
                ]
                content = json.dumps(tree).encode()
            elif path.startswith("/api/models/org/name"):
                files = [
                    {"rfilename": name, "size": len(data), "blobId": digest(data)}
                    for name, data in contents.items()
                ]
                content = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": files}).encode()
            elif path.startswith("/org/name/resolve/"):
                content = contents[unquote(path.rpartition("/")[2])]
                headers["etag"] = f'"{digest(content)}"'
                if span := self.headers.get("range"):
                    first, _, last = span.removeprefix("bytes=").partition("-")
                    headers["content-range"] = f"bytes {first}-{last}/{len(content)}"
                    content = content[int(first) : int(last) + 1]
                    status = 206
            else:
                status = 404
                headers["x-error-code"] = "RepoNotFound"
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body and path.endswith((".safetensors", ".gguf")):
                opens.wait()
                opens.num_bytes += len(content)
            if with_body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def online(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Make `hub` the hub of this process and its children. Yield the event that lets weights out:
    clear it to hold them back.
    """
    opens = Gate()
    opens.set()
    with hub(folder, opens) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        for name in ("ENDPOINT", "HF_HUB_OFFLINE"):
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", {"ENDPOINT": url}.get(name, 0))
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", url)
        yield opens
        opens.set()
