"""The options of the HTTP server and its processes."""

from typing import Annotated, Any

from servd.config._section import NotNegative, Positive, Seconds, Section, about


class ServerConfig(Section, frozen=True):
    """HTTP server."""

    host: Annotated[str, about("Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, about("TCP port; 0 picks a free one.", ge=0, le=65535)] = 8000
    enable_force_include_usage: Annotated[
        bool, about("Every stream tells the usage in a last chunk, whether asked to or not.")
    ] = False
    strict_fields: Annotated[
        bool,
        about("Refuse request fields without an effect (400), rather than name them in a header."),
    ] = False
    uds: Annotated[str | None, about("Listen on this Unix socket instead of host and port.")] = None
    console: Annotated[
        bool, about("Show people a page at `/`: talk to the model, look into the server.")
    ] = True
    chat_template: Annotated[
        str | None, about("Jinja chat template (file or text) to use instead of the model's.")
    ] = None
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        about(
            "Variables for the chat template that a request's `chat_template_kwargs` leaves out, "
            'as JSON: `{"enable_thinking": false}`.'
        ),
    ] = None
    escape_special_tokens: Annotated[
        bool,
        about(
            "Text of a chat that reads like a special token of the model stays text. Off: it "
            "becomes the token, so that a message can end its own turn."
        ),
    ] = True
    fim_template: Annotated[
        str | None,
        about(
            "Prompt for `suffix` of completions, with {prefix} and {suffix}. Default: by the "
            "model's fill-in-the-middle tokens."
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        about(
            "How the model writes tool calls. Default: what the chat template shows.",
            extra={"plugins": "servd.api.output.tool_parsers", "beside": ["none"]},
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        about(
            "How the model marks its reasoning. Default: what the chat template shows.",
            extra={"plugins": "servd.api.output.reasoning_parsers", "beside": ["none"]},
        ),
    ] = None
    enable_auto_tool_choice: Annotated[
        bool, about('Find tool calls in replies where `tool_choice` is "auto".')
    ] = True
    max_stored_responses: Annotated[
        NotNegative,
        about(
            "Responses of `/v1/responses` that an API server process keeps in memory for each API "
            "key; 0 stores none."
        ),
    ] = 1000
    api_server_count: Annotated[
        int, about("API server processes that share the port.", ge=1, le=64)
    ] = 1
    headless: Annotated[
        bool,
        about("Run the engine only; API servers elsewhere on this host join it with --attach."),
    ] = False
    attach: Annotated[
        str | None, about("Run API servers only, for the engine whose --ipc-dir this is.")
    ] = None
    ipc_dir: Annotated[
        str | None,
        about("Folder of the sockets between the processes. Default: a new private one."),
    ] = None
    max_connections: Annotated[
        Positive,
        about(
            "Open connections per API server process. Beyond them the longest idle one is closed; "
            "if none is idle, requests of new ones get 503 with Retry-After."
        ),
    ] = 4096
    header_timeout: Annotated[
        Seconds,
        about("Seconds from connecting to whole headers; then 408, or nothing to a silent client."),
    ] = 20.0
    body_timeout: Annotated[
        Seconds,
        about("Seconds over which a body must come at 1024 bytes per second on average; else 408."),
    ] = 30.0
    write_timeout: Annotated[
        Seconds,
        about("Seconds, up to twice as many, that a client may take no byte of its answer."),
    ] = 90.0
    shutdown_timeout: Annotated[
        float,
        about("Seconds that open requests get to finish after SIGTERM or Ctrl-C.", ge=0, le=86400),
    ] = 15.0
    max_engine_restarts: Annotated[
        NotNegative,
        about("Restarts of a dead engine, or API servers, within the window; then it ends."),
    ] = 20
    engine_restart_window: Annotated[Seconds, about("Seconds for which a death counts.")] = 600.0
    engine_hang_timeout: Annotated[
        Seconds,
        about(
            "Seconds without a sign of life, or beyond what a step should take, after which the "
            "engine is killed and started again."
        ),
    ] = 10.0
    sleep_idle_seconds: Annotated[
        Seconds | None,
        about(
            "Seconds without a request after which weights and KV cache are freed; the next one "
            "loads the model again. Default: never."
        ),
    ] = None
