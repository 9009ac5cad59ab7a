"""The process that tries grammars before an engine compiles them: a grammar may kill it."""

import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Sequence
from io import BufferedRWPair
from typing import Any

import msgspec

from servd.base import log
from servd.base.errors import ConfigError
from servd.core.structured_output.grammar import Grammar, GrammarError
from servd.core.structured_output.vocabulary import load_vocabulary
from servd.ipc.child import limit_memory, read_start
from servd.ipc.start_messages import Reply, StartLimitedProcess
from servd.messages.params import StructuredOutput

logger = logging.getLogger("servd.grammar")

MASK_LIMIT = 0.05  # seconds; the engine's step waits for masks
# Random beginnings of outputs to try; TRIAL_SECONDS is CPU time for all of them.
NUM_TRIALS = 4
TRIAL_TOKENS = 24
TRIAL_SECONDS = 0.02


def main() -> None:
    """Run the process: answer each line, a StructuredOutput as JSON, with a Reply."""
    start = read_start(StartLimitedProcess)
    log.setup("grammar", start.config.observability)
    channel = socket.socket(fileno=start.channel).makefile("rwb")
    threading.stack_size(start.stack_size)
    thread = threading.Thread(target=serve, args=[start, channel], name="check")
    thread.start()
    thread.join()


def serve(start: StartLimitedProcess, channel: BufferedRWPair) -> None:
    def answer(error: str | None = None) -> None:
        channel.write(msgspec.json.encode(Reply(error)) + b"\n")
        channel.flush()

    # A broken channel means that the API server has ended.
    with contextlib.suppress(ConnectionError):
        try:
            vocabulary = load_vocabulary(start.config, start.spec)
        except (ConfigError, ValueError) as error:
            # The library knows only byte-level and byte-fallback tokenizers.
            logger.warning("structured outputs are not available: %s", error)
            log.flush()  # the API server ends this process when it has the answer
            answer(f"structured outputs are not available with this model's tokenizer: {error}")
            return
        limit_memory(start.memory_limit)
        answer()
        for line in channel:
            answer(try_grammar(msgspec.json.decode(line, type=StructuredOutput), vocabulary))


def try_grammar(output: StructuredOutput, vocabulary: Any) -> str | None:
    """Return why the engine should not use a grammar; None if it can."""
    try:
        seconds = slowest_mask(Grammar(output, vocabulary), vocabulary)
    except GrammarError as error:
        return str(error)
    if seconds > MASK_LIMIT:
        return (
            "it is too complex: finding the tokens that may come next takes "
            f"{seconds:.2f} s, the limit is {MASK_LIMIT} s"
        )
    return None


def slowest_mask(grammar: Grammar, vocabulary: Any) -> float:
    """Return the CPU seconds of the slowest mask at the beginning of a few random outputs. Raises
    GrammarError if an output reaches a limit of the library, because most outputs might.
    """
    draw = random.Random(0)  # the same grammar gets the same verdict
    closing = [token_id for text in '"}]' for token_id in vocabulary.tokenize_str(text)]
    slowest = grammar.mask_seconds
    deadline = time.thread_time() + TRIAL_SECONDS
    for _ in range(NUM_TRIALS):
        matcher = grammar.matcher()
        for _ in range(TRIAL_TOKENS):
            start = time.thread_time()
            if matcher.is_complete or start > deadline:
                break
            mask = matcher.bitmask()
            slowest = max(slowest, time.thread_time() - start)
            matcher.accept(random_token(mask, draw, closing))
    return slowest


def random_token(mask: bytes, draw: random.Random, closing: Sequence[int]) -> int:
    allowed = int.from_bytes(mask, "little")
    if draw.random() < 0.3 and (ends := [i for i in closing if allowed >> i & 1]):
        return draw.choice(ends)
    start = draw.randrange(8 * len(mask))
    if above := allowed >> start:
        return start + _lowest_bit(above)
    return _lowest_bit(allowed)


def _lowest_bit(number: int) -> int:
    return (number & -number).bit_length() - 1


if __name__ == "__main__":
    main()
