"""The options of the HTTP server and its processes."""

from typing import Annotated, Any

from servd.config._section import NotNegative, Positive, Seconds, Section, about


class ServerConfig(Section, frozen=True):
    """HTTP server."""

    host: Annotated[str, about("Address to listen on. 0.0.0.0: all addresses.")] = "127.0.0.1"
    port: Annotated[int, about("TCP port to listen on. 0 picks a free one.", ge=0, le=65535)] = 8000
    enable_force_include_usage: Annotated[
        bool,
        about("Send the usage in the last chunk of every stream, whether the request asks or not."),
    ] = False
    strict_fields: Annotated[
        bool,
        about(
            "Reject requests with fields that have no effect (400). Default: list such "
            "fields in the X-Servd-Ignored header."
        ),
    ] = False
    uds: Annotated[str | None, about("Listen on this Unix socket instead of host and port.")] = None
    console: Annotated[
        bool,
        about("Serve the console at `/`: a page to chat with the model and inspect the server."),
    ] = True
    chat_template: Annotated[
        str | None, about("Jinja chat template, as a file or as text. Default: the model's.")
    ] = None
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        about(
            'Default variables for the chat template, as JSON: `{"enable_thinking": false}`. A '
            "request's `chat_template_kwargs` override them."
        ),
    ] = None
    escape_special_tokens: Annotated[
        bool,
        about(
            "Treat text in a chat that looks like a special token as plain text. If off, a "
            "message can end its own turn."
        ),
    ] = True
    fim_template: Annotated[
        str | None,
        about(
            "Prompt format for completions with a `suffix`, with {prefix} and {suffix}. Default: "
            "the model's fill-in-the-middle tokens."
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        about(
            "Format of the model's tool calls. Default: detected from the chat template.",
            extra={"plugins": "servd.api.output.tool_parsers", "beside": ["none"]},
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        about(
            "Format of the model's reasoning. Default: detected from the chat template.",
            extra={"plugins": "servd.api.output.reasoning_parsers", "beside": ["none"]},
        ),
    ] = None
    enable_auto_tool_choice: Annotated[
        bool, about('Parse tool calls in answers if `tool_choice` is "auto".')
    ] = True
    max_stored_responses: Annotated[
        NotNegative,
        about(
            "Maximum stored responses of `/v1/responses` per API key and API server. 0 stores none."
        ),
    ] = 1000
    api_server_count: Annotated[
        int, about("API server processes that share the port.", ge=1, le=64)
    ] = 1
    headless: Annotated[
        bool,
        about("Run the engine without API servers. Start them on the same host with --attach."),
    ] = False
    attach: Annotated[
        str | None, about("Run API servers only. The value is the --ipc-dir of the running engine.")
    ] = None
    ipc_dir: Annotated[
        str | None,
        about("Folder for the sockets between processes. Default: a new private folder."),
    ] = None
    max_connections: Annotated[
        Positive,
        about(
            "Maximum open connections per API server. Beyond it, servd closes the longest idle "
            "connection, or answers 503 if none is idle."
        ),
    ] = 4096
    header_timeout: Annotated[
        Seconds,
        about(
            "Seconds in which the headers must arrive. After that the client gets 408; if it sent "
            "nothing, servd closes the connection."
        ),
    ] = 20.0
    body_timeout: Annotated[
        Seconds,
        about(
            "Seconds over which servd measures the rate of a request body. Below 1024 bytes per "
            "second, the client gets 408."
        ),
    ] = 30.0
    write_timeout: Annotated[
        Seconds,
        about(
            "Seconds after which servd disconnects a client that does not read its answer. It may "
            "take twice as long."
        ),
    ] = 90.0
    shutdown_timeout: Annotated[
        float,
        about("Seconds that open requests have to finish after SIGTERM or Ctrl-C.", ge=0, le=86400),
    ] = 15.0
    max_engine_restarts: Annotated[
        NotNegative,
        about(
            "Maximum restarts of an engine, and of API servers, within --engine-restart-window. "
            "Beyond it, servd exits. 0 never restarts."
        ),
    ] = 20
    engine_restart_window: Annotated[
        Seconds, about("Seconds over which servd counts restarts for --max-engine-restarts.")
    ] = 600.0
    engine_hang_timeout: Annotated[
        Seconds,
        about(
            "Seconds without a heartbeat after which servd kills and restarts an engine. One step "
            "may take this plus five times its expected duration."
        ),
    ] = 10.0
    sleep_idle_seconds: Annotated[
        Seconds | None,
        about(
            "Seconds without a request after which servd frees weights and KV cache. The "
            "next request loads the model again. Default: never."
        ),
    ] = None
