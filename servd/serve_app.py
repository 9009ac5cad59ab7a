"""servd as an application of Ray Serve: `serve run servd.serve_app:build model=MODEL`. Each replica
is a server of its own, with all routes; Ray starts, balances, replaces and counts replicas.
"""

import importlib
import shutil
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from servd.base.private_dir import private_dir
from servd.config import Config
from servd.gateway.forward import connect, request_headers, response_headers, send_request
from servd.ipc.child import Child
from servd.ipc.start_messages import StartModel

MODULE = "servd.launch.model_server"
LOOK_INTERVAL = 0.2  # seconds between polls while the model loads
# Ray's default of 5 would limit the batch size.
DEFAULTS = {"name": "servd", "max_ongoing_requests": 1024, "health_check_period_s": 2}


class Replica:
    """A replica with its server, behind a Unix socket; both end together.

    Args:
        options: of `servd serve`.

    Raises:
        RuntimeError: the server has ended before its model was loaded: see its log.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.folder = private_dir()
        path = str(self.folder / "http")
        config = Config.load({**options, "uds": path})
        self.server = Child("server", MODULE, StartModel(config))
        self.http = connect(path)
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=10) as client:
            while not _is_ready(client):
                self.check_health()
                time.sleep(LOOK_INTERVAL)

    async def __call__(self, request: Request) -> Response:
        """Pass a request on and stream the response."""
        root = request.scope.get("root_path", "").rstrip("/")
        path = quote(request.scope["path"].removeprefix(root)).encode()
        headers = request_headers(request)
        answer = await send_request(self.http, request, path, headers, await request.body())
        response = StreamingResponse(
            answer.aiter_raw(), answer.status_code, background=BackgroundTask(answer.aclose)
        )
        response.raw_headers = response_headers(answer)
        return response

    def check_health(self) -> None:
        """Raise RuntimeError if the server has ended. Ray then replaces the replica."""
        if (code := self.server.exit_code) is not None:
            raise RuntimeError(f"the server has ended with code {code}: see its log")

    def __del__(self) -> None:
        """Finish open requests, then stop the server. Ray sends no new requests by now."""
        self.server.stop(Config().server.shutdown_timeout)
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("http://servd/health").status_code == 200
    except httpx.TransportError:
        return False


def build(args: Mapping[str, Any]) -> Any:
    """Return an application, for `serve run` and for its configuration files.

    Args:
        args: options of `servd serve`, with dashes or underscores; `deployment` has Ray's options:
            `num_replicas`, `autoscaling_config`, `ray_actor_options` and so on.
    """
    options = {name: value for name, value in args.items() if name != "deployment"}
    Config.load(options)  # report errors here, before replicas start
    serve = importlib.import_module("ray.serve")
    return serve.deployment(Replica).options(**DEFAULTS | args.get("deployment", {})).bind(options)
