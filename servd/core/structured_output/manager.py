"""GrammarManager: compiles grammars beside the step loop, and follows the rows of the steps that
have one.

It sees what the workers see, rows and sampled tokens, and keeps its own rows in the same way: a row
begins with a NewRequest, also after preemption, when the outputs so far are in it, and ends when
its slot is freed.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from servd.config import Config
from servd.core.structured_output.grammar import (
    Grammar,
    GrammarError,
    Matcher,
    UsedUp,
    load_vocabulary,
)
from servd.errors import ConfigError
from servd.hf import ModelSpec
from servd.messages import (
    EngineCoreRequest,
    GrammarBitmask,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
)
from servd.params import PoolingParams, SamplingParams, StructuredOutput

logger = logging.getLogger("servd.structured_output")

MAX_GRAMMARS = 32  # kept compiled, besides those in use
NUM_COMPILERS = 2  # threads
# A grammar whose states are used up is replaced in the engine's own thread, where all requests wait
# for it. So an output gets another one only if that compiles fast, has not to take in too much
# again, and not too often: twice, as the first one may be one that others are filling, and once
# more for so many tokens.
RENEWAL_LIMIT = 0.05  # seconds to compile it
MAX_TOKENS_AGAIN = 2048
MAX_RENEWALS = 2
TOKENS_PER_RENEWAL = 64

T = TypeVar("T")
Key = tuple[str, str]  # kind and value


@dataclass(slots=True)
class Compiled:
    """News for the engine's own thread: a grammar is ready, or cannot be had."""

    key: Key
    grammar: Grammar | None
    error: str | None = None


@dataclass(slots=True, eq=False)
class Row:
    """A running request with a grammar."""

    grammar: Grammar | None
    matcher: Matcher | None  # None after an error
    starts_after: frozenset[int]  # not empty: the grammar has not begun
    until_begun: (
        bytes | None
    )  # the tokens that may come before: all but those that would end the output
    renew: Callable[[Grammar], Grammar]  # another one for one whose states are used up
    token_ids: list[int] = field(default_factory=list)  # that the matcher has taken in
    num_renewals: int = 0  # of the grammar
    error: str | None = None
    num_awaited: int = 0  # tokens that steps in flight sample

    def accept(self, token_id: int) -> None:
        """Take in a sampled token."""
        if self.starts_after:
            if token_id in self.starts_after:
                self.starts_after = frozenset()
        else:
            self._follow(lambda matcher: matcher.accept(token_id))
            self.token_ids.append(token_id)

    def bitmask(self) -> bytes | None:
        """The tokens that may come next; None if all may."""
        if self.starts_after:
            return self.until_begun
        return self._follow(lambda matcher: matcher.bitmask())

    def _follow(self, work: Callable[[Matcher], T]) -> T | None:
        """`work` of the matcher, if need be in another grammar; None after an error."""
        while self.matcher is not None:
            try:
                return work(self.matcher)
            except UsedUp as error:
                self._begin_anew(error)
            except GrammarError as error:
                self.fail(error)
        return None

    def _begin_anew(self, error: UsedUp) -> None:
        """Take in all tokens again with a grammar that has fewer states; fail if that would happen
        too often.
        """
        self.num_renewals += 1
        num_tokens = len(self.token_ids)
        if (
            num_tokens > MAX_TOKENS_AGAIN
            or self.num_renewals > MAX_RENEWALS + num_tokens // TOKENS_PER_RENEWAL
        ):
            return self.fail(error)
        try:
            assert self.grammar is not None
            self.grammar = self.renew(self.grammar)
            self.matcher = self.grammar.matcher()
            for token_id in self.token_ids:
                self.matcher.accept(token_id)
        except GrammarError as new_error:
            self.fail(new_error)

    def fail(self, error: GrammarError) -> None:
        """The next token ends the request."""
        self.matcher = None
        self.error = f"the output cannot follow its structure any further: {error}"

    @property
    def end(self) -> str | None:
        """Why the output ends here: an error, or "" where it is complete. None if it goes on."""
        if self.matcher is None:
            return self.error
        return "" if not self.starts_after and self.matcher.is_complete else None


class GrammarManager:
    """Keeps the common path free of grammars: a step without any costs a look at its new requests.

    Args:
        config: resolved.
        spec: of the model.
    """

    def __init__(self, config: Config, spec: ModelSpec) -> None:
        self.config = config
        self.spec = spec
        # Called from another thread; whoever drives the engine passes the news to
        # `EngineCore.handle`.
        self.on_compiled: Callable[[Compiled], None] = lambda compiled: None
        self._threads = ThreadPoolExecutor(NUM_COMPILERS, "compile")
        self._vocabulary: Future[Any] | None = None
        self._grammars: OrderedDict[Key, Grammar] = OrderedDict()  # the least recently used first
        self._held: dict[
            int, Grammar
        ] = {}  # by id of a StructuredOutput, for as long as that is referred to
        self._compiling: dict[Key, list[EngineCoreRequest]] = {}
        self._rows: dict[int, Row] = {}  # by slot
        self._step: list[
            tuple[int, Row]
        ] = []  # (index in `scheduled`, row) of the rows that sample
        self._in_flight: deque[list[tuple[int, Row]]] = deque()

    # ---- before a request runs ----

    @property
    def is_compiling(self) -> bool:
        """Whether requests wait for a grammar."""
        return bool(self._compiling)

    def warm_up(self) -> None:
        """Begin to load what the first grammar needs."""
        if self._vocabulary is None:
            self._vocabulary = self._threads.submit(load_vocabulary, self.config, self.spec)

    def admit(self, request: EngineCoreRequest) -> bool:
        """Whether a request can run now. If not, it is kept until its grammar is compiled."""
        output = _structured_output(request.params)
        if output is None:
            return True
        key = (output.kind, output.value)
        if grammar := self._find(key):
            self._hold(output, grammar)
            return True
        if key not in self._compiling:
            self.warm_up()
            self._compiling[key] = []
            self._threads.submit(lambda: self.on_compiled(self._compile(output)))
        self._compiling[key].append(request)
        return False

    def take(self, compiled: Compiled) -> list[EngineCoreRequest]:
        """Keep a compiled grammar; returns the requests that waited for it."""
        self._keep(compiled)
        requests = self._compiling.pop(compiled.key)
        for request in requests:
            if compiled.grammar and (output := _structured_output(request.params)):
                self._hold(output, compiled.grammar)
        return requests

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests that wait for their grammars."""
        for requests in self._compiling.values():
            requests[:] = [request for request in requests if request.request_id not in request_ids]

    def _keep(self, compiled: Compiled) -> None:
        if compiled.grammar is not None:
            self._grammars[compiled.key] = compiled.grammar
            if len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)

    def _hold(self, output: StructuredOutput, grammar: Grammar) -> None:
        """Keep a grammar until the requests with this object have ended, however many others are
        compiled.
        """
        if id(output) not in self._held:
            weakref.finalize(output, self._held.pop, id(output), None).atexit = False
        self._held[id(output)] = grammar

    def _forget(self, grammar: Grammar | None) -> None:
        """New requests have it compiled anew; so do those that wait to run, if that does not stop
        the step loop.
        """
        for key in [key for key, other in self._grammars.items() if other is grammar]:
            del self._grammars[key]
        if grammar is None or grammar.seconds > RENEWAL_LIMIT:
            return
        for output_id in [output_id for output_id, other in self._held.items() if other is grammar]:
            del self._held[output_id]

    def _renew(self, output: StructuredOutput, grammar: Grammar) -> Grammar:
        """The grammar to go on with where another one's states are used up. Its outputs so far are
        taken in again.

        Raises:
            GrammarError: it takes too long to compile.
        """
        if (other := self._grammar_of(output)) is not None and other is not grammar:
            return other
        if grammar.seconds > RENEWAL_LIMIT:
            raise GrammarError("it has too many states")
        compiled = self._compile(output)
        if compiled.grammar is None:
            raise GrammarError(compiled.error)
        self._keep(compiled)
        for output_id in [output_id for output_id, held in self._held.items() if held is grammar]:
            self._held[output_id] = compiled.grammar
        return compiled.grammar

    def _grammar_of(self, output: StructuredOutput) -> Grammar | None:
        """The newest one: others may have used up the states of the one that was held for the
        output.
        """
        return self._find((output.kind, output.value)) or self._held.get(id(output))

    def _find(self, key: Key) -> Grammar | None:
        if key in self._grammars:
            self._grammars.move_to_end(key)
        return self._grammars.get(key)

    def _compile(self, output: StructuredOutput) -> Compiled:
        key = (output.kind, output.value)
        assert self._vocabulary is not None
        try:
            return Compiled(key, Grammar(output, self._vocabulary.result()))
        except (
            BaseException
        ) as error:  # whatever it is, a panic of the library too: its requests wait for the news
            logger.warning(
                "a %s grammar that the API accepted cannot be compiled: %r", output.kind, error
            )
            reason = (
                error
                if isinstance(error, GrammarError | ConfigError | ValueError)
                else type(error).__name__
            )
            return Compiled(key, None, f"the {output.kind} grammar cannot be compiled: {reason}")

    # ---- steps ----

    def begin_step(self, scheduled: SchedulerOutput) -> None:
        """Take over what changes in the rows, and find those of this step that a grammar rules."""
        for slot in scheduled.freed_slots:
            self._rows.pop(slot, None)
        for request in scheduled.new_requests:
            if (output := _structured_output(request.params)) is not None:
                self._rows[request.slot] = self._row(request, output)
        self._step = []
        if self._rows:
            self._step = [
                (index, self._rows[item.slot])
                for index, item in enumerate(scheduled.scheduled)
                if item.samples and item.slot in self._rows
            ]

    @property
    def awaits_tokens(self) -> bool:
        """Whether this step's masks depend on tokens that are still in flight."""
        return any(row.num_awaited for _, row in self._step)

    def bitmask(self) -> GrammarBitmask | None:
        """What the rows of this step may sample."""
        self._in_flight.append(self._step)
        masks: list[tuple[int, bytes]] = []
        for index, row in self._step:
            row.num_awaited += 1
            if (mask := row.bitmask()) is not None:
                masks.append((index, mask))
        if not masks:
            return None
        return GrammarBitmask([index for index, _ in masks], b"".join([mask for _, mask in masks]))

    def advance(self, output: ModelRunnerOutput) -> dict[int, str]:
        """Take in the tokens of the oldest step in flight.

        Returns:
            The indices in `scheduled` of the outputs that end with this token: "" if complete, else
            the error.
        """
        ends: dict[int, str] = {}
        for index, row in self._in_flight.popleft():
            for token_id in output.sampled_token_ids[index]:
                row.num_awaited -= 1
                row.accept(token_id)
            if (end := row.end) is not None:
                ends[index] = end
            # the states that it shares with its outputs may be at their limit: the next ones begin
            # anew
            if end:
                self._forget(row.grammar)
        return ends

    def _row(self, request: NewRequest, output: StructuredOutput) -> Row:
        grammar = self._grammar_of(output)
        if grammar is None:  # another output has used up its grammar
            self._keep(compiled := self._compile(output))
            grammar = compiled.grammar
        row = Row(
            grammar,
            grammar.matcher() if grammar else None,
            frozenset(output.starts_after),
            all_but(request.eos_token_ids, self.spec.vocab_size) if request.eos_token_ids else None,
            partial(self._renew, output),
        )
        if grammar is None:
            row.fail(GrammarError("the grammar cannot be compiled again"))
        for token_id in request.token_ids[request.num_prompt_tokens :]:
            row.accept(token_id)
        return row


def all_but(token_ids: list[int], vocab_size: int) -> bytes:
    """A bitmask of all tokens but these: int32 [ceil(vocab_size / 32)]."""
    mask = bytearray(b"\xff" * (4 * -(-vocab_size // 32)))
    for token_id in token_ids:
        mask[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(mask)


def _structured_output(params: SamplingParams | PoolingParams) -> StructuredOutput | None:
    return params.structured_output if isinstance(params, SamplingParams) else None
