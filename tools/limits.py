"""docs/reference/limits.md: bounds on what a client may send, read from the code that has them."""

from __future__ import annotations

from servd.api.batches import runner as batch_runner
from servd.api.batches import store as batch_store
from servd.api.engine import grammar_checker, media_fetcher, media_loader
from servd.api.http import http_protocol, inflated, middleware
from servd.api.output import json_reader
from servd.api.protocol import batch_file as batch
from servd.api.protocol import completions, decisions, validation
from servd.api.request import output_collector
from servd.api.responses import conversations, response_store
from servd.api.routes import files
from servd.api.serving import events, pooling
from servd.api.text import chat_template
from servd.base import bounds
from servd.config import MultiModalConfig, SchedulerConfig, ServerConfig
from servd.core.structured_output import grammar
from servd.messages import params
from servd.worker import media_process

Row = tuple[str, str, str]

HEAD = """\
# Limits

<!-- Generated from the constants in servd/ by `make docs`; changes here are lost. -->

Every limit on what a client may send, and what servd does beyond it. Limits with a flag show the
default. [HTTP API](http.md#fields) has the bounds of sampling parameters.
[Overload](../explanation/overload.md) explains shares and rates.
"""


def size(num_bytes: int) -> str:
    """A number of bytes in the largest unit that divides it: `32 MiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes % factor == 0:
            return f"{num_bytes // factor:,} {unit}"
    return f"{num_bytes:,} bytes"


def tables() -> dict[str, list[Row]]:
    """Heading -> what is bounded, by how much, and the answer beyond it."""
    server = ServerConfig()
    scheduler = SchedulerConfig()
    return {
        "Connections": [
            (
                "open connections per API server",
                f"{server.max_connections:,} (`--max-connections`)",
                "servd closes the longest idle connection; 503 if none is idle",
            ),
            (
                "size of the request line and the headers",
                size(http_protocol.MAX_HEAD),
                "431, closed",
            ),
            (
                "time until the headers are complete",
                f"{server.header_timeout:g} s (`--header-timeout`)",
                "408, closed",
            ),
            (
                "speed of a body",
                f"at least {http_protocol.MIN_BODY_RATE:,} bytes/s, averaged over "
                f"{server.body_timeout:g} s (`--body-timeout`)",
                "408, closed",
            ),
            (
                f"size of the chunks of a body, after {http_protocol.MAX_SMALL_CHUNKS:,} chunks",
                f"at least {http_protocol.MIN_CHUNK} bytes on average",
                "400, closed",
            ),
            (
                "unread bytes of all answers of an API server",
                size(http_protocol.MAX_UNREAD),
                "servd closes the connections of the slowest readers",
            ),
            (
                "time in which the client reads nothing of its answer",
                f"{server.write_timeout:g} s (`--write-timeout`)",
                "closed; servd cancels the request",
            ),
        ],
        "Bodies": [
            ("size of a body", size(middleware.MAX_BODY), "413"),
            ("size of all bodies that are still arriving", size(middleware.MAX_ARRIVING), "429"),
            (
                "a compressed body beyond the size of the decoded one",
                size(inflated.MAX_EXCESS),
                "400",
            ),
            (
                "elements, containers and keys in the JSON of a body; keys count twice",
                f"{validation.MAX_VALUES:,}",
                "400",
            ),
            ("keys of `metadata`", f"{validation.MAX_KEYS}", "400"),
            ("prompts per request", f"{completions.MAX_PROMPTS:,}", "400"),
            ("choices per request, over all prompts", f"{completions.MAX_CHOICES:,}", "400"),
            ("choices per prompt (`n`)", f"{params.MAX_N}", "400"),
            ("beams", f"{params.MAX_BEAMS}", "400"),
            ("options per decision request", f"{decisions.MAX_OPTIONS:,}", "400"),
            ("stop strings", f"{params.MAX_STOP} of {params.MAX_STOP_LENGTH:,} characters", "400"),
            (
                "bad words",
                f"{params.MAX_BAD_WORDS} of {params.MAX_BAD_WORD_LENGTH} characters or "
                f"{params.MAX_BAD_WORD_TOKENS} tokens",
                "400",
            ),
            ("`timeout`", f"{bounds.MAX_TIMEOUT:,} s", "400"),
        ],
        "Files and batches": [
            ("size of an uploaded file", size(batch_store.MAX_UPLOAD), "413"),
            ("`Content-Type` of an uploaded file", f"{files.MAX_CONTENT_TYPE:,} characters", "400"),
            ("simultaneous uploads per API key", f"{batch_store.MAX_UPLOADS}", "429"),
            ("files and batches per API key", f"{batch_store.MAX_OBJECTS:,}", "400"),
            (
                "size of all files of an API key, before an upload",
                size(batch_store.MAX_BYTES),
                "400",
            ),
            (
                "age of files and batches",
                f"{batch_store.RETENTION // 86400} days",
                "servd deletes them",
            ),
            ("lines per batch", f"{batch.MAX_LINES:,}", "the batch fails"),
            ("size of a line", size(batch.MAX_LINE), "the batch fails"),
            (
                "running batches per API key",
                f"{batch_runner.MAX_BATCHES_PER_KEY}",
                "other batches wait",
            ),
        ],
        "Work": [
            ("prompt plus output", "`--max-model-len` tokens", "400 `context_length_exceeded`"),
            (
                "unfinished prompts per API server",
                f"{scheduler.max_waiting_requests:,} (`--max-waiting-requests`)",
                "429",
            ),
            (
                "tokens of unfinished prompts per API server",
                f"{scheduler.max_waiting_tokens:,} (`--max-waiting-tokens`)",
                "429",
            ),
            ("CPU time of a chat template", f"{chat_template.MAX_SECONDS:g} s", "400"),
            (
                "text that a chat template writes, and each of its values",
                f"{chat_template.MAX_CHARS:,} characters",
                "400",
            ),
            (
                "size of a schema, regular expression or grammar",
                size(params.MAX_GRAMMAR_BYTES),
                "400",
            ),
            ("time to compile a grammar", f"{grammar_checker.TIME_LIMIT:g} s", "400"),
            ("memory to compile a grammar", size(grammar_checker.MEMORY_LIMIT), "400"),
            ("parser items per token of a grammar", f"{grammar.MAX_ITEMS:,}", "400"),
            (
                "time until the grammars of other requests are compiled",
                f"{grammar_checker.QUEUE_LIMIT:g} s",
                "429",
            ),
        ],
        "Pictures": [
            (
                "pictures in a prompt",
                f"{MultiModalConfig().max_images} (`--limit-mm-per-prompt`)",
                "400",
            ),
            ("size of a picture", size(media_loader.MAX_BYTES), "400"),
            ("pixels of a picture", f"{media_process.MAX_PIXELS:,}", "400"),
            ("length of a side", f"{media_process.MAX_RATIO} times that of the other", "400"),
            (
                "CPU time to decode and process a picture",
                f"{media_loader.TIME_LIMIT / 2:g} to {media_loader.TIME_LIMIT:g} s",
                "400",
            ),
            ("memory to do so", size(media_loader.MEMORY_LIMIT), "400"),
            (
                "time to fetch a picture",
                f"{media_fetcher.TIMEOUT:g} s, {media_fetcher.MAX_REDIRECTS} redirects",
                "400",
            ),
            (
                "pictures that are being read, per API server",
                size(media_loader.MAX_IN_FLIGHT),
                "503",
            ),
            (
                "processed pictures of unfinished requests, per API server",
                f"{size(media_loader.MAX_IN_USE)}, {media_loader.MAX_FILES:,} pictures",
                "503",
            ),
        ],
        "Answers": [
            (
                "log-probabilities in one answer; in a stream, those that the client has not read",
                f"{output_collector.MAX_LOGPROBS_HELD:,}; `/v1/responses` "
                f"{events.EventFormatter.max_logprobs:,}",
                "400",
            ),
            ("numbers in the vectors of one answer", f"{pooling.MAX_NUMBERS:,}", "400"),
            (
                "repaired mistakes in the arguments of one tool call",
                f"{json_reader.MAX_REPAIRS:,}",
                "the rest is a string in their place",
            ),
            (
                "candidates per token (`logprobs`)",
                f"{params.MAX_LOGPROBS} (`--max-logprobs`)",
                "400",
            ),
            (
                "stored responses and conversations per API key, in memory",
                f"{response_store.MAX_IN_MEMORY:,} (`--max-stored-responses`); "
                f"{size(response_store.MIN_BYTES)} to {size(response_store.MAX_BYTES)}",
                "servd removes the oldest; a running response stays",
            ),
            (
                "the same with `--response-db`",
                f"{size(response_store.MAX_BYTES_IN_FILE)} (`--response-max-bytes`)",
                "servd removes the oldest; a running response stays",
            ),
            (
                "age of a stored response or conversation",
                f"{server.response_max_age / 86400:g} days (`--response-max-age`)",
                "servd removes it",
            ),
            (
                "running background responses per API key and API server",
                f"{response_store.MAX_RUNNING:,}",
                "429",
            ),
            ("items of a conversation", f"{conversations.MAX_ITEMS:,}", "400"),
        ],
    }


def page() -> str:
    """docs/reference/limits.md."""
    parts = [HEAD]
    for heading, rows in tables().items():
        parts.append(f"\n## {heading}\n\n| what | limit | beyond it |\n|---|---|---|\n")
        parts += [f"| {what} | {limit} | {answer} |\n" for what, limit, answer in rows]
    return "".join(parts)
