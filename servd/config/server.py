"""The options of the HTTP server and its processes."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from servd.config._section import NotNegative, Positive, Seconds, Section


class ServerConfig(Section, frozen=True):
    """HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0: all addresses."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """TCP port to listen on. 0 picks a free one."""
    enable_force_include_usage: bool = False
    """Send the usage in the last chunk of every stream, whether the request asks or not."""
    strict_fields: bool = False
    """Reject requests with fields that have no effect (400). Default: list such fields in the
    X-Servd-Ignored header.
    """
    uds: str | None = None
    """Listen on this Unix socket instead of host and port."""
    console: bool = True
    """Serve the console at `/`: a page to chat with the model and inspect the server."""
    chat_template: str | None = None
    """Jinja chat template, as a file or as text. Default: the model's."""
    default_chat_template_kwargs: dict[str, Any] | None = None
    """Default variables for the chat template, as JSON: `{"enable_thinking": false}`. A request's
    `chat_template_kwargs` override them.
    """
    escape_special_tokens: bool = True
    """Treat text in a chat that looks like a special token as plain text. If off, a message can end
    its own turn.
    """
    fim_template: str | None = None
    """Prompt format for completions with a `suffix`, with {prefix} and {suffix}. Default: the
    model's fill-in-the-middle tokens.
    """
    tool_call_parser: Annotated[
        str | None, Meta(extra={"plugins": "servd.api.output.tool_parsers", "beside": ["none"]})
    ] = None
    """Format of the model's tool calls. Default: detected from the chat template."""
    reasoning_parser: Annotated[
        str | None,
        Meta(extra={"plugins": "servd.api.output.reasoning_parsers", "beside": ["none"]}),
    ] = None
    """Format of the model's reasoning. Default: detected from the chat template."""
    enable_auto_tool_choice: bool = True
    """Parse tool calls in answers if `tool_choice` is "auto"."""
    enforce_tool_schemas: Literal["auto", "strict", "off"] = "auto"
    """Tools whose calls must match their schemas if `tool_choice` is "auto". auto: those with
    `strict`, and custom tools with a grammar. strict: all."""
    response_db: str | None = None
    """SQLite file for stored responses and conversations, which API servers share and a restart
    keeps. Default: each API server has its own, in memory.
    """
    max_stored_responses: NotNegative | None = None
    """Maximum stored responses and conversations per API key. 0 stores none. Default: 1000, or no
    limit with --response-db.
    """
    response_max_bytes: Positive | None = None
    """Maximum size of the stored responses and conversations of an API key, in bytes or as "2GiB".
    Default: 1GiB with --response-db; in memory, all keys share 256MiB.
    """
    response_max_age: Annotated[float, Meta(gt=0)] = 30 * 86400.0
    """Seconds after its last change until servd removes a response or conversation."""
    api_server_count: Annotated[int, Meta(ge=1, le=64)] = 1
    """API server processes that share the port."""
    headless: bool = False
    """Run the engine without API servers. Start them on the same host with --attach."""
    attach: str | None = None
    """Run API servers only. The value is the --ipc-dir of the running engine."""
    ipc_dir: str | None = None
    """Folder for the sockets between processes. Default: a new private folder."""
    max_connections: Positive = 4096
    """Maximum open connections per API server. Beyond it, servd closes the longest idle connection,
    or answers 503 if none is idle.
    """
    header_timeout: Seconds = 20.0
    """Seconds in which the headers must arrive. After that the client gets 408; if it sent nothing,
    servd closes the connection.
    """
    body_timeout: Seconds = 30.0
    """Seconds over which servd measures the rate of a request body. Below 1024 bytes per second,
    the client gets 408.
    """
    write_timeout: Seconds = 90.0
    """Seconds after which servd disconnects a client that does not read its answer. It may take
    twice as long.
    """
    shutdown_timeout: Annotated[float, Meta(ge=0, le=86400)] = 15.0
    """Seconds that open requests have to finish after SIGTERM or Ctrl-C."""
    max_engine_restarts: NotNegative = 20
    """Maximum restarts of an engine, and of API servers, within --engine-restart-window. Beyond it,
    servd exits. 0 never restarts.
    """
    engine_restart_window: Seconds = 600.0
    """Seconds over which servd counts restarts for --max-engine-restarts."""
    engine_hang_timeout: Seconds = 10.0
    """Seconds without a heartbeat after which servd kills and restarts an engine. One step may take
    this plus five times its expected duration.
    """
    engine_heartbeat_timeout: Annotated[float, Meta(ge=1, le=3600)] = 3.0
    """Seconds without a heartbeat after which an engine or worker on another host counts as lost,
    and its requests continue elsewhere.
    """
    sleep_idle_seconds: Seconds | None = None
    """Seconds without a request after which servd frees weights and KV cache. The next request
    loads the model again. Default: never.
    """
