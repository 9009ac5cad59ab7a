"""Recorder: appends requests and steps to a file, without text, for `servd what-if`."""

from __future__ import annotations

import contextlib
import logging
import os
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from servd.api.choice import Choice
from servd.api.request_state import Observer, RequestState
from servd.config import Config, options_by_name
from servd.errors import ConfigError
from servd.messages import EngineDead, EngineReady, EngineStatus
from servd.params import SamplingParams
from servd.stats import SchedulerStats
from servd.tracing import StepRecord

log = logging.getLogger("servd.api")

KEY_SIZE = 32  # bytes
OPTIONS = (  # what `servd what-if` can vary
    "block_size", "enable_prefix_caching", "kv_offloading_size", "max_num_seqs",
    "max_num_batched_tokens", "scheduling_policy", "long_prefill_token_threshold",
    "enable_chunked_prefill", "data_parallel_size", "max_model_len",
)  # fmt: skip


class ServerLine(msgspec.Struct):
    """The engines of a recording."""

    num_blocks: int
    kv_bytes_per_block: int
    options: dict[str, Any]
    kv_windows: tuple[int | None, ...] = (None,)  # see WorkerReady


class StepLine(msgspec.Struct, array_like=True, gc=False):
    engine: int
    started_ns: int
    harvested_ns: int
    num_tokens: int
    num_requests: int


class RequestLine(msgspec.Struct, omit_defaults=True, gc=False):
    """A choice of a prompt: the keys of published traces, and more."""

    timestamp: float  # of its arrival, in milliseconds
    input_length: int
    output_length: int
    # Equal where the prompt is, up to the end of the block; a last one may be filled in part.
    hash_ids: list[int] = []
    output_hash_ids: list[int] = []  # of the blocks that the answer completed
    block_size: int = 512  # tokens
    max_tokens: int | None = None
    client: str = ""
    engine: int = 0
    cached: int = 0  # tokens found in the prefix cache
    # Milliseconds after its arrival; 0: it did not come so far.
    sent: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    returned: float = 0.0  # the API server has the last token


class Recorder(Observer):
    """Appends to a file, also with other API servers and over restarts. Blocks are known by hashes
    with a key, which is kept beside the file: who has the file alone cannot try out texts.

    Args:
        path: of the file.
        config: resolved.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: str, config: Config) -> None:
        self.config = config
        try:
            self._key = _shared_key(Path(f"{path}.key"))
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"--record-trace {path}: {error.strerror}") from None
        self._lines: list[bytes] = []
        self._has_begun = False

    def stepped(self, steps: Sequence[StepRecord], stats: SchedulerStats | None, rank: int) -> None:
        """Keep steps until a request ends."""
        for each in steps:
            line = StepLine(
                rank, each.started_ns, each.harvested_ns, each.num_tokens, each.num_requests
            )
            self._lines.append(msgspec.json.encode({"step": line}))

    def ended(self, state: RequestState, status: EngineStatus | EngineReady | EngineDead) -> None:
        if not isinstance(status, EngineReady):
            return
        if not self._has_begun:
            self._has_begun = True
            options: dict[str, Any] = {}
            for name in OPTIONS:
                section, _ = options_by_name()[name]
                options[name] = getattr(getattr(self.config, section), name)
            worker = status.worker
            options["max_model_len"] = status.max_model_len
            line = ServerLine(
                worker.num_blocks, worker.kv_bytes_per_block, options, worker.kv_windows
            )
            self._lines.insert(0, msgspec.json.encode({"server": line}))
        request, size = state.request, self.config.cache.block_size
        prompt, last = request.prompt_token_ids, repr(request.options.cache_keys).encode()
        ids, last = self._hashes(prompt, self._digest(last))  # the same for all choices
        rest = prompt[len(ids) * size :]
        for choice in state.choices:
            output_ids, _ = self._hashes([*rest, *choice.token_ids], last)
            line = self._line(state, choice, ids, output_ids)
            self._lines.append(msgspec.json.encode(line))
        lines, self._lines = b"\n".join([*self._lines, b""]), []
        try:
            os.write(self._file, lines)  # at once, or others' lines would come between
        except OSError as error:
            log.warning("--record-trace: %s", error.strerror)

    def close(self) -> None:
        os.close(self._file)

    def _line(
        self, state: RequestState, choice: Choice, ids: list[int], output_ids: list[int]
    ) -> RequestLine:
        request, size = state.request, self.config.cache.block_size
        options, params = request.options, request.params

        def since(at_ns: int | None) -> float:
            return (at_ns - choice.arrival_ns) / 1e6 if at_ns else 0.0

        marks = choice.marks
        return RequestLine(
            choice.arrival_ns / 1e6, len(request.prompt_token_ids), choice.num_tokens,
            ids, output_ids, size,
            params.max_tokens if isinstance(params, SamplingParams) else 0,
            self._digest(options.owner.encode()).hex()[:8] if options.owner else "",
            state.rank, choice.num_cached_tokens,
            since(state.sent_ns), since(marks.get("scheduled")), since(marks.get("first_token")),
            since(marks.get("finished")), since(choice.last_ns),
        )  # fmt: skip

    def _hashes(self, token_ids: list[int], last: bytes) -> tuple[list[int], bytes]:
        """Of all full blocks after `last`, 53 bits each: what any reader of JSON can take. Also the
        digest of the last one.
        """
        size, found = self.config.cache.block_size, list[int]()
        for at in range(0, len(token_ids) - size + 1, size):
            last = self._digest(last + array("I", token_ids[at : at + size]).tobytes())
            found.append(int.from_bytes(last, "little") >> 11)
        return found, last

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=8, key=self._key).digest()


def _shared_key(path: Path) -> bytes:
    """The key in a file; the first one who asks makes it."""
    with contextlib.suppress(FileExistsError):
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_bytes(b"")
        new.chmod(0o600)
        new.write_bytes(os.urandom(KEY_SIZE))
        try:
            os.link(new, path)  # whole, or not at all
        finally:
            new.unlink()
    return path.read_bytes()
