"""docs/reference/limits.md: bounds on what a client may send, read from the code that has them."""

from __future__ import annotations

from servd.api.batches import runner as batch_runner
from servd.api.batches import store as batch_store
from servd.api.builders import events
from servd.api.engine import grammar_checker
from servd.api.http import http_protocol, middleware
from servd.api.protocol import batch_file as batch
from servd.api.protocol import completions, decisions, validation
from servd.api.request import delta_stream
from servd.api.responses import response_store
from servd.api.routes import files, pooling
from servd.api.text import chat_template
from servd.base import bounds
from servd.config import SchedulerConfig, ServerConfig
from servd.core.structured_output import grammar
from servd.messages import params

Row = tuple[str, str, str]

HEAD = """\
# Limits

<!-- Generated from the constants in servd/ by `make docs`; changes here are lost. -->

Every bound on what a client may send, and the answer beyond it. Flags show their defaults.
[http.md](http.md) has the bounds of single sampling parameters, and
[overload](../explanation/overload.md) explains shares and rates. [options.md](options.md) has all
flags.
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
                "open connections, per API server",
                f"{server.max_connections:,} (`--max-connections`)",
                "the longest idle one is closed, else 503",
            ),
            (
                "request line and headers",
                size(http_protocol.MAX_HEAD),
                "431, closed",
            ),
            ("time for them", f"{server.header_timeout:g} s (`--header-timeout`)", "408, closed"),
            (
                "rate of a body",
                f"{http_protocol.MIN_BODY_RATE:,} bytes/s over {server.body_timeout:g} s "
                "(`--body-timeout`)",
                "408, closed",
            ),
            (
                f"size of its chunks, after {http_protocol.MAX_SMALL_CHUNKS:,}",
                f"{http_protocol.MIN_CHUNK} bytes on average",
                "400, closed",
            ),
            (
                "time without taking a byte of the answer",
                f"{server.write_timeout:g} s (`--write-timeout`)",
                "closed, the request is aborted",
            ),
        ],
        "Bodies": [
            ("body", size(middleware.MAX_BODY), "413"),
            ("bodies that are still arriving, together", size(middleware.MAX_ARRIVING), "429"),
            ("elements, keys and containers of its JSON", f"{validation.MAX_VALUES:,}", "400"),
            ("keys of `metadata`", f"{validation.MAX_KEYS}", "400"),
            ("prompts of a request", f"{completions.MAX_PROMPTS:,}", "400"),
            ("choices of a request, over all prompts", f"{completions.MAX_CHOICES:,}", "400"),
            ("choices of a prompt, `n`", f"{params.MAX_N}", "400"),
            ("beams", f"{params.MAX_BEAMS}", "400"),
            ("options of a decision request", f"{decisions.MAX_OPTIONS:,}", "400"),
            ("stop strings", f"{params.MAX_STOP} of {params.MAX_STOP_LENGTH:,} characters", "400"),
            (
                "bad words",
                f"{params.MAX_BAD_WORDS} of {params.MAX_BAD_WORD_LENGTH} characters or "
                f"{params.MAX_BAD_WORD_TOKENS} tokens",
                "400",
            ),
            ("deadline, `timeout`", f"{bounds.MAX_TIMEOUT:,} s", "400"),
        ],
        "Files and batches": [
            ("upload", size(batch_store.MAX_UPLOAD), "413"),
            ("its `Content-Type`", f"{files.MAX_CONTENT_TYPE:,} characters", "400"),
            ("uploads of a key at the same time", f"{batch_store.MAX_UPLOADS}", "429"),
            ("files and batches of a key", f"{batch_store.MAX_OBJECTS:,}", "400"),
            ("their bytes, before an upload", size(batch_store.MAX_BYTES), "400"),
            (
                "age of files and batches",
                f"{batch_store.RETENTION // 86400} days",
                "they are removed",
            ),
            ("lines of a batch", f"{batch.MAX_LINES:,}", "the batch fails"),
            ("a line", size(batch.MAX_LINE), "the batch fails"),
            (
                "batches of a key run at the same time",
                f"{batch_runner.MAX_BATCHES_PER_KEY}",
                "the others wait",
            ),
        ],
        "Work": [
            ("prompt plus output", "`--max-model-len` tokens", "400 `context_length_exceeded`"),
            (
                "unfinished prompts, per API server",
                f"{scheduler.max_waiting_requests:,} (`--max-waiting-requests`)",
                "429",
            ),
            (
                "their tokens, by their lengths until they are tokenised",
                f"{scheduler.max_waiting_tokens:,} (`--max-waiting-tokens`)",
                "429",
            ),
            ("CPU time of a chat template", f"{chat_template.MAX_SECONDS:g} s", "400"),
            (
                "what it writes, and each of its values",
                f"{chat_template.MAX_CHARS:,} characters",
                "400",
            ),
            (
                "schema, regular expression or grammar",
                size(params.MAX_GRAMMAR_BYTES),
                "400",
            ),
            ("time to compile it", f"{grammar_checker.TIME_LIMIT:g} s", "400"),
            ("memory to compile it", size(grammar_checker.MEMORY_LIMIT), "400"),
            ("parser items for a token of it", f"{grammar.MAX_ITEMS:,}", "400"),
            (
                "time until others' are compiled",
                f"{grammar_checker.QUEUE_LIMIT:g} s",
                "429",
            ),
        ],
        "Answers": [
            (
                "log-probabilities in one body, or of a stream that its client has not read",
                f"{delta_stream.MAX_LOGPROBS_HELD:,}; in responses "
                f"{events.EventBuilder.max_logprobs:,}",
                "400",
            ),
            ("numbers of vectors in one body", f"{pooling.MAX_NUMBERS:,}", "400"),
            (
                "candidates for each token, `logprobs`",
                f"{params.MAX_LOGPROBS} (`--max-logprobs`)",
                "400",
            ),
            (
                "stored responses of a key",
                f"{server.max_stored_responses:,} (`--max-stored-responses`), "
                f"{size(response_store.MIN_BYTES)} to {size(response_store.MAX_BYTES)}",
                "the oldest finished one is dropped",
            ),
        ],
    }


def page() -> str:
    """docs/reference/limits.md."""
    parts = [HEAD]
    for heading, rows in tables().items():
        parts.append(f"\n## {heading}\n\n| what | limit | beyond it |\n|---|---|---|\n")
        parts += [f"| {what} | {limit} | {answer} |\n" for what, limit, answer in rows]
    return "".join(parts)
