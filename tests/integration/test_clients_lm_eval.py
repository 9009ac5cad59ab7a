"""lm-eval's `local-completions` on a real server: log-likelihoods equal teacher-forced ones."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[clients]'")
# Its own warnings are not servd's.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PAIRS = [
    ("Licensed under the Apache License", ", Version 2.0"),
    ("You may obtain a copy", " of the License at"),
    ("", "Unless required by applicable law"),
    ("a", "b"),
    ("A longer context that fills several blocks of the cache, " * 4, "and an end"),
    ("A longer context that fills several blocks of the cache, " * 4, "and another end"),
]


@pytest.fixture(scope="module")
def lm(llama_server, tiny_llama: Path):
    """lm-eval's model."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=f"{llama_server.url}/v1/completions",
        model="tiny",
        tokenizer=str(tiny_llama),
        tokenizer_backend="huggingface",
        num_concurrent=1,
        batch_size=3,
        max_length=500,
    )


@pytest.fixture(scope="module")
def reference(tiny_llama: Path):
    """The same checkpoint in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


@torch.inference_mode()
def teacher_forced(reference, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Log-probability of the continuation, and whether greedy decoding would give it."""
    logits = reference(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    expected = torch.tensor(continuation)
    chosen = logits.log_softmax(-1).gather(1, expected[:, None])
    return float(chosen.sum()), bool((logits.argmax(-1) == expected).all())


def test_loglikelihood(lm, reference):
    from lm_eval.api.instance import Instance

    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    for pair, (logprob, is_greedy) in zip(
        PAIRS, lm.loglikelihood(requests, disable_tqdm=True), strict=True
    ):
        context, continuation = (
            lm._encode_pair(*pair) if pair[0] else ([lm.prefix_token_id], lm.tok_encode(pair[1]))
        )
        expected, expected_greedy = teacher_forced(reference, context, continuation)
        assert logprob == pytest.approx(expected, abs=1e-3)
        assert is_greedy == expected_greedy


def greedy(reference, ids: list[int], num_tokens: int) -> list[int]:
    """The continuation by transformers."""
    out = reference.generate(
        torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return out[0, len(ids) :].tolist()


def test_a_greedy_continuation_is_recognised(lm, reference):
    ids = lm.tok_encode("Licensed under")
    out = greedy(reference, ids, 6)
    ((logprob, is_greedy),) = lm._loglikelihood_tokens([(None, ids, out)], disable_tqdm=True)
    assert is_greedy
    assert logprob == pytest.approx(teacher_forced(reference, ids, out)[0], abs=1e-3)


def test_generate_until(lm, reference):
    from lm_eval.api.instance import Instance

    context = "Licensed under"
    options = {"max_gen_toks": 12, "until": ["\n\n"], "temperature": 0.0}
    (text,) = lm.generate_until(
        [Instance("generate_until", {}, (context, options), 0)], disable_tqdm=True
    )
    expected = lm.tokenizer.decode(
        greedy(reference, lm.tok_encode(context), 12), skip_special_tokens=True
    )
    assert text == expected.split("\n\n")[0]
