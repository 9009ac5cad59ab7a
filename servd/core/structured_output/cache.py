"""GrammarCache: keeps recent compiled grammars, and the grammars in use."""

import weakref
from collections import OrderedDict
from collections.abc import Callable

from servd.core.structured_output.grammar import Grammar, GrammarError
from servd.messages.params import StructuredOutput

MAX_GRAMMARS = 32  # kept besides the grammars in use
# Longest compilation that is repeated in the engine's thread, where all requests wait.
RECOMPILE_LIMIT = 0.05  # seconds

Key = tuple[str, str]  # of a StructuredOutput


class GrammarCache:
    """The recently used grammars, and the grammars of all unfinished requests. `compile` compiles
    an output's grammar, and raises GrammarError.
    """

    def __init__(self, compile: Callable[[StructuredOutput], Grammar]) -> None:
        self._compile = compile
        self._recent: OrderedDict[Key, Grammar] = OrderedDict()  # the least recently used first
        # By id() of a StructuredOutput, as long as that exists.
        self._in_use: dict[int, Grammar] = {}

    def find(self, output: StructuredOutput) -> Grammar | None:
        """Return the newest grammar of this output: older ones may have no lexer states left."""
        if (grammar := self._recent.get(output.key)) is not None:
            self._recent.move_to_end(output.key)
            return grammar
        return self._in_use.get(id(output))

    def add(self, key: Key, grammar: Grammar) -> None:
        self._recent[key] = grammar
        if len(self._recent) > MAX_GRAMMARS:
            self._recent.popitem(last=False)

    def retain(self, output: StructuredOutput, grammar: Grammar) -> None:
        """Keep a grammar until all requests that share `output` have ended."""
        if id(output) not in self._in_use:
            weakref.finalize(output, self._in_use.pop, id(output), None).atexit = False
        self._in_use[id(output)] = grammar

    def find_or_compile(self, output: StructuredOutput) -> Grammar:
        """Return the grammar of an admitted request's output, compiled again if necessary. Raises
        GrammarError if compilation fails.
        """
        grammar = self.find(output)
        if grammar is None:
            self.add(output.key, grammar := self._compile(output))
        return grammar

    def replace(self, output: StructuredOutput, grammar: Grammar) -> Grammar:
        """Return a replacement for a grammar that has no lexer states left. Raises GrammarError if
        compilation takes too long.
        """
        if (newer := self.find(output)) is not None and newer is not grammar:
            return newer
        if grammar.seconds > RECOMPILE_LIMIT:
            raise GrammarError("the grammar has too many states")
        self.add(output.key, newer := self._compile(output))
        for output_id in self._users(grammar):
            self._in_use[output_id] = newer
        return newer

    def discard(self, grammar: Grammar) -> None:
        """Remove a grammar that failed, as it may have no lexer states left. Later requests compile
        it again; admitted requests do so if compilation is fast enough.
        """
        for key in [key for key, other in self._recent.items() if other is grammar]:
            del self._recent[key]
        if grammar.seconds <= RECOMPILE_LIMIT:
            for output_id in self._users(grammar):
                del self._in_use[output_id]

    def _users(self, grammar: Grammar) -> list[int]:
        return [output_id for output_id, other in self._in_use.items() if other is grammar]
