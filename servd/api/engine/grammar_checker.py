"""GrammarChecker: rejects invalid structured outputs before they reach the engine."""

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from servd.api.engine.limited_process import LimitedProcess
from servd.base.errors import InvalidRequest
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.ipc.start_messages import Reply, StartLimitedProcess
from servd.messages.params import MAX_GRAMMAR_BYTES, StructuredOutput

MODULE = "servd.core.structured_output.checker"
TIME_LIMIT = 2.0  # seconds for one grammar
MEMORY_LIMIT = 256 << 20  # bytes for one grammar; large schemas take 20 MB
# Bytes, a quarter of the engine's. The library recurses into nested rules, about 2 kB each.
STACK_SIZE = 2 << 20
QUEUE_LIMIT = 10.0  # seconds that a grammar waits for others to be checked
MAX_VERDICTS = 1024  # cached
ATTEMPTS = 2
UNKNOWN = "unknown"


@dataclass(eq=False)
class GrammarChecker:
    """A process that compiles each grammar once, with limits of size and time. Thread-safe.

    The grammar library does not bound all of its work, and some inputs crash its process. The
    engine compiles with the same limits, so it only receives grammars that compiled here.
    """

    config: Config  # resolved; its limits are those of the engine
    spec: ModelSpec

    def __post_init__(self) -> None:
        start = StartLimitedProcess(self.config, self.spec, MEMORY_LIMIT, STACK_SIZE)
        self._process = LimitedProcess("grammar", MODULE, "structured outputs", Reply, start)
        self.start = self._process.start
        self.close = self._process.close
        self._verdicts: OrderedDict[tuple[str, str], str | None] = OrderedDict()

    def knows(self, output: StructuredOutput) -> bool:
        """Return whether the grammar is known to compile, without blocking. Raise InvalidRequest if
        the grammar is known not to compile.
        """
        # A single lookup: another thread may evict the verdict between two.
        error = self._verdicts.get(output.key, UNKNOWN)
        if error is UNKNOWN:
            return False
        if error is not None:
            raise InvalidRequest(f"{output.param}: {error}", param=output.param)
        return True

    def check(self, output: StructuredOutput, client: str = "") -> None:
        """Block until the grammar is known to compile. Clients take turns.

        Raises InvalidRequest: the grammar is malformed, not supported, too large or too complex;
        Overloaded: too many grammars are being checked, this client's grammars take too long, or
        the process has died and the next call restarts it.
        """
        if not self.knows(output) and (error := self._verdict(output, client)) is not None:
            raise InvalidRequest(f"{output.param}: {error}", param=output.param)

    def _verdict(self, output: StructuredOutput, client: str) -> str | None:
        size = len(output.value.encode())
        if size > MAX_GRAMMAR_BYTES:
            return f"the {output.kind} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are accepted"
        with self._process.turns.take(client, QUEUE_LIMIT):
            if self.knows(output):  # another request had the same grammar
                return None
            error = self._verdicts[output.key] = self._compile(output)
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
            return error

    def _compile(self, output: StructuredOutput) -> str | None:
        """Compile a grammar in the process. Return the problem, or None. If the process dies, retry
        once, because another grammar may be the cause. Raise Unavailable as `LimitedProcess.ask`.
        """
        line = msgspec.json.encode(output) + b"\n"
        for _ in range(ATTEMPTS):
            try:
                return self._process.ask(lambda channel: channel.sendall(line), TIME_LIMIT).error
            except TimeoutError:
                break
            except OSError:
                continue
        return (
            f"the {output.kind} is too complex or too deeply nested: it cannot be compiled within "
            f"{TIME_LIMIT:.0f} s, {MEMORY_LIMIT >> 20} MB of memory and {STACK_SIZE >> 20} MB of "
            "stack"
        )
