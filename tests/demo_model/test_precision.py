"""Weights of 8 and 16 bits: how much worse the demo model predicts text that it never saw."""

from itertools import islice
from math import exp
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from servd import LLM, SamplingParams
from tools.demo_model.corpus import Corpus
from tools.demo_model.train import encode, parse

MODEL = Path(__file__).parents[2] / "servd" / "demo_model"
NUM_EXAMPLES = 100


@pytest.fixture(scope="module")
def held_out():
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return encode(islice(Corpus(parse([]).seed, held_out=True), NUM_EXAMPLES), tokenizer, 1024)


def perplexity(sequences, **options: str) -> float:
    """Perplexity of answers' tokens, given those before."""
    llm = LLM("demo", device="cpu", executor="uniproc", enable_prefix_caching=False, **options)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([sequence.ids for sequence in sequences], params, use_tqdm=False)
    llm.close()
    losses = []
    for sequence, output in zip(sequences, outputs, strict=True):
        for counted, token_id, position in zip(
            sequence.counted, sequence.ids, output.prompt_logprobs, strict=True
        ):
            if counted and position is not None:
                losses.append(-position[token_id].logprob)
    return exp(sum(losses) / len(losses))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_perplexity_changes_by_less_than_a_percent(held_out):
    exact = perplexity(held_out, dtype="float32")
    for name, options in {
        "bfloat16": {"dtype": "bfloat16"},
        "int8": {"quantization": "int8", "cpu_activation_dtype": "float32"},
        "int8 activations": {"quantization": "int8"},
    }.items():
        change = perplexity(held_out, **options) / exact - 1
        print(f"{name}: {change:+.3%} of {exact:.4f}")
        assert abs(change) < 0.01
