"""Recorder: appends requests and steps to a file, without text, for `servd simulate`."""

import contextlib
import logging
import os
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from servd.api.request.observer import Observer
from servd.api.request.request_state import RequestState
from servd.base.errors import ConfigError
from servd.base.tracing import StepRecord
from servd.config import Config, options_by_name
from servd.messages.engine import EngineGone, EngineReady, EngineStatus
from servd.messages.params import SamplingParams
from servd.messages.stats import SchedulerStats
from servd.simulate.traces import OPTIONS, RequestLine, ServerLine, StepLine

log = logging.getLogger("servd.api")

KEY_SIZE = 32  # bytes


class Recorder(Observer):
    """Appends to a file, which other API servers share, also after restarts. Blocks are identified
    by keyed hashes. The key is in another file: nobody can test texts without it.
    """

    def __init__(self, path: str, config: Config) -> None:
        self.config = config
        self.block_size = config.cache.block_size
        try:
            self._key = _shared_key(Path(f"{path}.key"))
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"--record-trace {path}: {error.strerror}") from None
        self._lines: list[msgspec.Struct | dict[str, msgspec.Struct]] = []
        self._has_begun = False

    def stepped(self, steps: Sequence[StepRecord], stats: SchedulerStats | None, rank: int) -> None:
        """Record steps; they are kept in memory until a request ends."""
        for record in steps:
            line = StepLine(
                rank, record.started_ns, record.collected_ns, record.num_tokens, record.num_requests
            )
            self._lines.append({"step": line})

    def ended(self, state: RequestState, status: EngineStatus | EngineReady | EngineGone) -> None:
        if not isinstance(status, EngineReady):
            return
        if not self._has_begun:
            self._has_begun = True
            self._lines.insert(0, {"server": self._describe_server(status)})
        self._lines += self._describe_choices(state)
        lines = b"".join(msgspec.json.encode(line) + b"\n" for line in self._lines)
        self._lines.clear()
        try:
            os.write(self._file, lines)  # at once, or others' lines would come between
        except OSError as error:
            log.warning("--record-trace: %s", error.strerror)

    def close(self) -> None:
        os.close(self._file)

    def _describe_server(self, status: EngineReady) -> ServerLine:
        worker = status.worker
        options = {
            name: getattr(getattr(self.config, options_by_name()[name][0]), name)
            for name in OPTIONS
        }
        options["max_model_len"] = status.max_model_len
        return ServerLine(worker.num_blocks, worker.kv_bytes_per_block, options, worker.kv_windows)

    def _describe_choices(self, state: RequestState) -> list[RequestLine]:
        request = state.request
        options = request.options
        params = request.params
        prompt = request.prompt_token_ids
        root = self._digest(repr(options.cache_keys).encode())
        prompt_ids, last = self._hash_blocks(prompt, root)  # the same for all choices
        tail = prompt[len(prompt_ids) * self.block_size :]
        client = self._digest(options.owner.encode()).hex()[:8] if options.owner else ""
        max_tokens = params.max_tokens if isinstance(params, SamplingParams) else 0
        lines: list[RequestLine] = []
        for choice in state.choices:
            output_ids, _ = self._hash_blocks([*tail, *choice.token_ids], last)
            line = RequestLine(
                choice.arrival_ns / 1e6,
                len(prompt),
                choice.num_tokens,
                prompt_ids,
                output_ids,
                self.block_size,
                max_tokens,
                client,
                state.rank,
                choice.num_cached_tokens,
            )
            marks = choice.marks | {"sent": state.sent_ns, "returned": choice.last_ns}
            for name in ("sent", "scheduled", "first_token", "finished", "returned"):
                if at_ns := marks.get(name):
                    setattr(line, name, (at_ns - choice.arrival_ns) / 1e6)
            lines.append(line)
        return lines

    def _hash_blocks(self, token_ids: list[int], last: bytes) -> tuple[list[int], bytes]:
        """Return the hashes of all full blocks after the digest `last`, and the last digest.
        A hash has 53 bits, so that any JSON reader keeps it exact.
        """
        size = self.block_size
        ids: list[int] = []
        for at in range(0, len(token_ids) - size + 1, size):
            last = self._digest(last + array("I", token_ids[at : at + size]).tobytes())
            ids.append(int.from_bytes(last, "little") >> 11)
        return ids, last

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=8, key=self._key).digest()


def _shared_key(path: Path) -> bytes:
    """Return the key in a file. The first API server creates the file."""
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
