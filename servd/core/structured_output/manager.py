"""GrammarManager: compiles grammars in threads, and makes the bitmasks of rows with a grammar.

A row begins with a NewRequest, which may have output already, and ends when its slot is freed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from servd.base.errors import ConfigError
from servd.base.tracing import Mark, now_ns
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.core.request import OutputEnd
from servd.core.structured_output.cache import GrammarCache, Key
from servd.core.structured_output.grammar import Grammar, GrammarError, Matcher, UsedUp
from servd.core.structured_output.vocabulary import load_vocabulary
from servd.messages.engine import (
    EngineCoreRequest,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequest,
    ScheduledRequest,
    SchedulerOutput,
)
from servd.messages.params import PoolingParams, SamplingParams, StructuredOutput

logger = logging.getLogger("servd.structured_output")

NUM_COMPILERS = 2  # threads
STACK_SIZE = 8 << 20  # bytes of each thread: four times the checker's
# Time for all masks of a step, estimated from each row's latest masks. Rows beyond it skip the
# step, so that other rows wait for a few slow masks, not for all.
STEP_BUDGET = 0.05  # seconds
# A grammar that has used up its lexer states is compiled again in the engine's thread, where all
# requests wait. So an output gets a new grammar only if it is short enough to replay, and not too
# often: twice, as other outputs may use up the first new grammar, and once more per
# TOKENS_PER_RENEWAL.
MAX_TOKENS_AGAIN = 2048
MAX_RENEWALS = 2
TOKENS_PER_RENEWAL = 64

T = TypeVar("T")


@dataclass(slots=True)
class Compiled:
    key: Key
    grammar: Grammar | None
    error: str | None = None


@dataclass(slots=True, eq=False)
class GrammarRow:
    grammar: Grammar | None
    matcher: Matcher | None  # None after an error
    starts_after: Sequence[int]  # not empty: the grammar has not begun
    # Tokens that are allowed before the grammar begins: all but the tokens that end an output.
    until_begun: bytes | None
    replace: Callable[[Grammar], Grammar]  # see GrammarCache.replace
    token_ids: list[int] = field(default_factory=list)  # tokens that the matcher has accepted
    latest: tuple[int, ...] = ()  # last tokens, as many as `starts_after` has
    num_renewals: int = 0  # how often the grammar was compiled again
    error: str | None = None
    num_awaited: int = 0  # steps in flight that sample this row
    draft_token_ids: list[int] = field(default_factory=list)  # for its next step
    mask_seconds: float = 0.0  # estimate for the next step, from the slowest recent masks
    last_turn: int = 0  # see GrammarManager.choose_idle

    def accept(self, token_id: int) -> None:
        if self.starts_after:
            self.latest = (*self.latest, token_id)[-len(self.starts_after) :]
            if self.latest == tuple(self.starts_after):
                self.starts_after = ()
        else:
            self._follow(lambda matcher: matcher.accept(token_id))
            self.token_ids.append(token_id)

    def forced_tokens(self) -> list[int]:
        if self.starts_after:
            return []
        start = time.perf_counter()
        token_ids = self._follow(lambda matcher: matcher.forced_tokens()) or []
        self.mask_seconds = max(time.perf_counter() - start, self.mask_seconds)
        return token_ids

    def bitmasks(self, draft_token_ids: list[int]) -> list[bytes | None]:
        """Return the tokens allowed next and after each draft, up to a refused draft; None: all."""
        start = time.perf_counter()
        masks = [self._bitmask()]
        probe = self
        for token_id in draft_token_ids:
            if probe is self:
                probe = replace(self, matcher=self.matcher and self.matcher.copy())
                probe.token_ids = self.token_ids.copy()
            probe.accept(token_id)
            if probe.end is not None:
                break
            masks.append(probe._bitmask())
        self.mask_seconds = max(time.perf_counter() - start, self.mask_seconds / 2)
        return masks

    def _bitmask(self) -> bytes | None:
        if self.starts_after:
            return self.until_begun
        return self._follow(lambda matcher: matcher.bitmask())

    def _follow(self, work: Callable[[Matcher], T]) -> T | None:
        """Call `work` with the matcher of the grammar, recompiled if needed; None: it failed."""
        while self.matcher is not None:
            try:
                return work(self.matcher)
            except UsedUp as error:
                self._begin_anew(error)
            except GrammarError as error:
                self.fail(error)
        return None

    def _begin_anew(self, error: UsedUp) -> None:
        """Replay all tokens in a recompiled grammar; fail if that happened too often."""
        self.num_renewals += 1
        num_tokens = len(self.token_ids)
        if (
            num_tokens > MAX_TOKENS_AGAIN
            or self.num_renewals > MAX_RENEWALS + num_tokens // TOKENS_PER_RENEWAL
        ):
            self.fail(error)
            return
        try:
            assert self.grammar is not None
            self.grammar = self.replace(self.grammar)
            self.matcher = self.grammar.matcher()
            for token_id in self.token_ids:
                self.matcher.accept(token_id)
        except GrammarError:  # the library ran out within a token, and takes it for a wrong one
            self.fail(error)

    def fail(self, error: GrammarError) -> None:
        """End the output with an error. The next token is not part of the output."""
        self.matcher = None
        self.error = f"the output cannot follow its structure any further: {error}"

    @property
    def end(self) -> OutputEnd | None:
        """The end of the output by its grammar; None: the output continues."""
        if self.matcher is None:
            return OutputEnd(error=self.error)
        return OutputEnd() if not self.starts_after and self.matcher.is_complete else None


@dataclass(eq=False)
class GrammarManager:
    """The engine's grammars. In a step without grammars, only new requests are checked."""

    config: Config  # resolved
    spec: ModelSpec

    def __post_init__(self) -> None:
        # Called from another thread; the message is to be passed to `EngineCore.handle`.
        self.on_compiled: Callable[[Compiled], None] = lambda compiled: None
        self._threads = ThreadPoolExecutor(NUM_COMPILERS, "compile")
        self._vocabulary: Future[Any] | None = None
        self._cache = GrammarCache(self._compile)
        self._compiling: dict[Key, list[EngineCoreRequest]] = {}
        self._rows: dict[int, GrammarRow] = {}  # by slot
        # Rows of the step that sample: index, row, what is scheduled.
        self._step: list[tuple[int, GrammarRow, ScheduledRequest]] = []
        self._turn = 0
        self._in_flight: deque[list[tuple[int, GrammarRow, ScheduledRequest]]] = deque()

    # ---- before a request runs ----

    def waiting(self) -> Iterator[EngineCoreRequest]:
        return chain.from_iterable(self._compiling.values())

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._compiling.values()))

    @property
    def is_compiling(self) -> bool:
        return bool(self._compiling)

    def warm_up(self) -> None:
        if self._vocabulary is None:
            self._vocabulary = self._submit(partial(load_vocabulary, self.config, self.spec))

    def admit(self, request: EngineCoreRequest) -> bool:
        """Return whether a request can run now. If not, keep it until its grammar is compiled."""
        output = _structured_output(request.params)
        if output is None:
            return True
        if grammar := self._cache.find(output):
            self._cache.retain(output, grammar)
            return True
        key = output.key
        if key not in self._compiling:
            self.warm_up()
            self._compiling[key] = []
            self._submit(lambda: self.on_compiled(self._try_to_compile(output)))
        request.marks = [*request.marks, Mark("compiling", now_ns())]
        self._compiling[key].append(request)
        return False

    def take(self, compiled: Compiled) -> list[EngineCoreRequest]:
        """Cache a compiled grammar; return the requests that waited for it."""
        requests = self._compiling.pop(compiled.key)
        for request in requests:
            request.marks = [*request.marks, Mark("compiled", now_ns())]
        if compiled.grammar is not None:
            self._cache.add(compiled.key, compiled.grammar)
            for request in requests:
                if output := _structured_output(request.params):
                    self._cache.retain(output, compiled.grammar)
        return requests

    def abort(self, request_ids: list[str]) -> list[EngineCoreRequest]:
        """Remove requests that wait for their grammars, and return them."""
        gone = []
        ids = set(request_ids)
        for requests in self._compiling.values():
            gone += [request for request in requests if request.request_id in ids]
            requests[:] = [request for request in requests if request.request_id not in ids]
        return gone

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in a thread with a stack of STACK_SIZE; return its Future."""
        previous = threading.stack_size(STACK_SIZE)
        try:
            return self._threads.submit(work)
        finally:
            threading.stack_size(previous)

    def _try_to_compile(self, output: StructuredOutput) -> Compiled:
        try:
            return Compiled(output.key, self._compile(output))
        except BaseException as error:  # whatever it is, requests wait for the message
            is_known = isinstance(error, GrammarError | ConfigError | ValueError)
            reason = str(error) if is_known else type(error).__name__
        logger.warning(
            "a %s grammar that the API accepted cannot be compiled: %s", output.kind, reason
        )
        error = f"the {output.kind} grammar cannot be compiled: {reason}"
        return Compiled(output.key, None, error)

    def _compile(self, output: StructuredOutput) -> Grammar:
        assert self._vocabulary is not None
        return Grammar(output, self._vocabulary.result())

    # ---- steps ----

    def begin_step(self, scheduled: SchedulerOutput) -> None:
        for slot in scheduled.freed_slots:
            self._rows.pop(slot, None)
        for request in scheduled.new_requests:
            self._rows.pop(request.slot, None)
            if (output := _structured_output(request.params)) is not None:
                self._rows[request.slot] = self._row(request, output)
        self._step = []
        if self._rows:
            self._step = [
                (index, self._rows[item.slot], item)
                for index, item in enumerate(scheduled.rows)
                if item.samples and item.slot in self._rows
            ]

    def forget_rows(self) -> None:
        self._rows.clear()

    def choose_idle(self) -> Set[int]:
        """Return the slots that skip the next step, to keep masks within STEP_BUDGET.

        Rows with fast masks always run. The other rows take turns, longest waiting first, within
        the budget, but at least one row runs.
        """
        if not self._rows or sum(r.mask_seconds for r in self._rows.values()) <= STEP_BUDGET:
            return frozenset()
        self._turn += 1
        share = STEP_BUDGET / len(self._rows)
        slow = [(slot, row) for slot, row in self._rows.items() if row.mask_seconds > share]
        idle: set[int] = set()
        budget = STEP_BUDGET
        for slot, row in sorted(slow, key=lambda item: item[1].last_turn):
            if row.mask_seconds <= budget or budget == STEP_BUDGET:
                budget -= row.mask_seconds
                row.last_turn = self._turn
            else:
                idle.add(slot)
        return idle

    def grammar_tokens(self) -> dict[int, list[int]]:
        """Map each slot to the only tokens, if any, that its grammar allows after known tokens."""
        if not self._rows or self.spec.keeps_state:  # recurrent states cannot take drafts back
            return {}
        forced = {slot: row.forced_tokens() for slot, row in self._rows.items()}
        return {slot: token_ids for slot, token_ids in forced.items() if token_ids}

    @property
    def awaits_tokens(self) -> bool:
        """Whether the masks of this step depend on tokens in flight."""
        return bool(self._step) and any(row.num_awaited for _, row, _ in self._step)

    def get_grammar_bitmask(self) -> GrammarOutput | None:
        """Return the allowed tokens of this step's rows; None: all tokens are allowed."""
        self._in_flight.append(self._step)
        if not self._step:
            return None
        allowed = GrammarOutput([], [], b"")
        masks = []
        for index, row, item in self._step:
            row.num_awaited += 1
            drafts = item.scheduled_spec_decode_tokens or row.draft_token_ids[: item.num_drafts]
            for offset, mask in enumerate(row.bitmasks(drafts)):
                if mask is not None:
                    allowed.indices.append(index)
                    allowed.offsets.append(offset)
                    masks.append(mask)
        allowed.bitmask = b"".join(masks)
        return allowed if masks else None

    def advance(self, output: ModelRunnerOutput) -> dict[int, OutputEnd]:
        """Process the tokens of the oldest step in flight. Return, by row, how the output ends, for
        rows that end at one of these tokens.
        """
        ends: dict[int, OutputEnd] = {}
        for index, row, _ in self._in_flight.popleft():
            row.num_awaited -= 1
            row.draft_token_ids = output.draft_token_ids.get(index, [])
            for num_tokens, token_id in enumerate(output.tokens_of(index), 1):
                row.accept(token_id)
                if (end := row.end) is not None:
                    ends[index] = replace(end, num_tokens=num_tokens)
                    if end.error is not None and row.grammar is not None:
                        self._cache.discard(row.grammar)
                    break
        return ends

    def _row(self, request: NewRequest, output: StructuredOutput) -> GrammarRow:
        eos = request.eos_token_ids
        until_begun = all_but(eos, self.spec.vocab_size) if eos else None
        renew = partial(self._cache.replace, output)
        row = GrammarRow(None, None, output.starts_after, until_begun, renew)
        try:
            row.grammar = self._cache.find_or_compile(output)
            row.matcher = row.grammar.matcher()
            row.mask_seconds = row.grammar.mask_seconds
        except GrammarError as error:
            row.fail(error)
        for token_id in request.token_ids[request.num_prompt_tokens :]:
            row.accept(token_id)
        return row


def all_but(token_ids: list[int], vocab_size: int) -> bytes:
    """Return a bitmask of all tokens except `token_ids`: int32 [ceil(vocab_size / 32)]."""
    mask = bytearray(b"\xff" * (4 * -(-vocab_size // 32)))
    for token_id in token_ids:
        mask[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(mask)


def _structured_output(params: SamplingParams | PoolingParams) -> StructuredOutput | None:
    return params.structured_output if isinstance(params, SamplingParams) else None
