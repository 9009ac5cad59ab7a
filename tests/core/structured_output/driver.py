"""Random outputs of a grammar, without a model."""

import random

from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import Config
from servd.core.executor.fake import next_state, sample_allowed
from servd.core.structured_output.grammar import Grammar
from servd.core.structured_output.vocabulary import load_vocabulary
from servd.messages.params import StructuredOutput

EOS = FAKE_SPEC.eos_token_ids[0]
VOCABULARY = load_vocabulary(Config(), FAKE_SPEC)


def compile_grammar(kind: str, value: str = "") -> Grammar:
    """Over the vocabulary of bytes."""
    return Grammar(StructuredOutput(kind, value), VOCABULARY)


def random_output(grammar: Grammar, seed: int, max_tokens: int = 400) -> bytes | None:
    """One output, every token drawn from the mask; None if it was cut off."""
    matcher, state, output = grammar.matcher(), random.Random(seed).getrandbits(64), bytearray()
    while not matcher.is_complete:
        if len(output) == max_tokens:
            return None
        token_id = sample_allowed(state, matcher.bitmask(), -1)
        matcher.accept(token_id)
        state = next_state(state, token_id)
        if token_id != EOS:
            output.append(token_id)
    return bytes(output)
