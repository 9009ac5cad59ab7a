"""Process that tries grammars before an engine sees them: one that explodes harms nothing here and
can be killed.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from io import BufferedRWPair
from typing import Any

import msgspec

from servd import log
from servd.child import read_start
from servd.core.structured_output.grammar import Grammar, GrammarError, load_vocabulary
from servd.errors import ConfigError
from servd.messages import GrammarVerdict, StartGrammarChecker
from servd.params import StructuredOutput

logger = logging.getLogger("servd.grammar")

MASK_LIMIT = 0.05  # seconds; the engine's step waits for masks


def main() -> None:
    """Entry point: answer each line of JSON, a StructuredOutput, with a line of JSON, a
    GrammarVerdict.
    """
    start = read_start(StartGrammarChecker)
    log.setup("grammar", start.config.observability.log_level)
    channel = socket.socket(fileno=start.channel).makefile("rwb")
    with contextlib.suppress(
        ConnectionError
    ):  # the API server has ended: nobody waits for an answer
        serve(start, channel)


def serve(start: StartGrammarChecker, channel: BufferedRWPair) -> None:
    """Say whether grammars can be had at all, then try one after another until the channel is
    closed.
    """

    def answer(verdict: GrammarVerdict) -> None:
        channel.write(msgspec.json.encode(verdict) + b"\n")
        channel.flush()

    try:
        vocabulary = load_vocabulary(start.config, start.spec)
    except (
        ConfigError,
        ValueError,
    ) as error:  # the library knows only byte-level and byte-fallback tokenizers
        logger.warning("structured outputs are not available: %s", error)
        answer(
            GrammarVerdict(
                f"structured outputs are not available with this model's tokenizer: {error}"
            )
        )
        return
    answer(GrammarVerdict())
    for line in channel:
        answer(
            GrammarVerdict(
                try_grammar(msgspec.json.decode(line, type=StructuredOutput), vocabulary)
            )
        )


def try_grammar(output: StructuredOutput, vocabulary: Any) -> str | None:
    """Why the engine should not follow a grammar; None if it can."""
    try:
        matcher = Grammar(output, vocabulary).matcher()
        start = time.thread_time()
        matcher.bitmask()
    except GrammarError as error:
        return str(error)
    seconds = time.thread_time() - start
    if seconds > MASK_LIMIT:
        return f"it is too complex: finding the first allowed tokens takes {seconds:.2f} s, the limit is {MASK_LIMIT} s"
    return None


if __name__ == "__main__":
    main()
