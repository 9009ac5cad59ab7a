"""GrammarCache: compiled grammars, and which of them an output goes on with."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable

from servd.core.structured_output.grammar import Grammar, GrammarError
from servd.params import StructuredOutput

MAX_GRAMMARS = 32  # kept compiled, besides those in use
# Grammars are compiled again in the engine's own thread, where all requests wait: only those that
# take no longer than this.
RECOMPILE_LIMIT = 0.05  # seconds

Key = tuple[str, str]  # kind and value


def key_of(output: StructuredOutput) -> Key:
    """What outputs of the same form have in common."""
    return output.kind, output.value


class GrammarCache:
    """The grammars used last, and those of all unfinished requests.

    Args:
        compile: compiles the grammar of an output; raises GrammarError.
    """

    def __init__(self, compile: Callable[[StructuredOutput], Grammar]) -> None:
        self._compile = compile
        self._recent: OrderedDict[Key, Grammar] = OrderedDict()  # the least recently used first
        # By id of a StructuredOutput, for as long as that is referred to.
        self._in_use: dict[int, Grammar] = {}

    def find(self, output: StructuredOutput) -> Grammar | None:
        """The newest grammar of this form: others may have used up the states of an older one."""
        if (grammar := self._recent.get(key_of(output))) is not None:
            self._recent.move_to_end(key_of(output))
            return grammar
        return self._in_use.get(id(output))

    def add(self, key: Key, grammar: Grammar) -> None:
        """Keep a grammar that was just compiled."""
        self._recent[key] = grammar
        if len(self._recent) > MAX_GRAMMARS:
            self._recent.popitem(last=False)

    def retain(self, output: StructuredOutput, grammar: Grammar) -> None:
        """Keep a grammar, however many others are compiled, until this object's requests end."""
        if id(output) not in self._in_use:
            weakref.finalize(output, self._in_use.pop, id(output), None).atexit = False
        self._in_use[id(output)] = grammar

    def find_or_compile(self, output: StructuredOutput) -> Grammar:
        """The grammar of an output whose request was admitted; if need be, compiled again.

        Raises:
            GrammarError: it cannot be compiled.
        """
        grammar = self.find(output)
        if grammar is None:
            self.add(key_of(output), grammar := self._compile(output))
        return grammar

    def replace(self, output: StructuredOutput, grammar: Grammar) -> Grammar:
        """The grammar to go on with where the states of `grammar` are used up.

        Raises:
            GrammarError: it takes too long to compile.
        """
        if (newer := self.find(output)) is not None and newer is not grammar:
            return newer
        if grammar.seconds > RECOMPILE_LIMIT:
            raise GrammarError("it has too many states")
        self.add(key_of(output), newer := self._compile(output))
        for output_id in self._users(grammar):
            self._in_use[output_id] = newer
        return newer

    def discard(self, grammar: Grammar) -> None:
        """Have later requests compile it anew, as the states that its outputs share may be at their
        limit; so do admitted ones, if that does not stop the step loop.
        """
        for key in [key for key, other in self._recent.items() if other is grammar]:
            del self._recent[key]
        if grammar.seconds <= RECOMPILE_LIMIT:
            for output_id in self._users(grammar):
                del self._in_use[output_id]

    def _users(self, grammar: Grammar) -> list[int]:
        return [output_id for output_id, other in self._in_use.items() if other is grammar]
