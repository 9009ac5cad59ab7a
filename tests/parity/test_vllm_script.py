"""A script for vLLM runs with another import. Its log-probabilities are those of transformers."""

import math
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import servd

# As users of vLLM write it: keywords, attributes and shapes are vLLM's.
SCRIPT = """
import math

from vllm import LLM, RequestOutput, SamplingParams

llm = LLM(
    model=MODEL, dtype="float32", enforce_eager=True, gpu_memory_utilization=0.5, max_model_len=128,
    trust_remote_code=True, seed=0, disable_log_stats=True,
)
prompts = ["Once upon a time", "The capital of France is"]
greedy = SamplingParams(
    temperature=0.0, top_k=-1, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True,
    stop=None, stop_token_ids=None, logit_bias=None, bad_words=None,
)
outputs: list[RequestOutput] = llm.generate(prompts, greedy, use_tqdm=False)
perplexities = []
for output in outputs:
    scores = []
    for token_id, position in zip(output.prompt_token_ids, output.prompt_logprobs):
        if position is not None:
            scores.append(position[token_id].logprob)
    perplexities.append(math.exp(-sum(scores) / len(scores)))
choices = [output.outputs[0] for output in outputs]
best = []
for choice in choices:
    likely = [max(entries.values(), key=lambda entry: entry.logprob) for entries in choice.logprobs]
    best.append([entry.decoded_token for entry in likely])

alone = llm.generate(
    prompts[0], SamplingParams(temperature=1.0, n=2, seed=3, max_tokens=5, logprobs=0)
)[0]
one_token = llm.generate(
    {"prompt_token_ids": [5]}, SamplingParams(max_tokens=1, prompt_logprobs=0)
)[0]
whole = llm.generate(prompts[0], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))[0]
stopped = llm.generate(
    prompts[0], SamplingParams(temperature=0.0, max_tokens=20, stop=whole.outputs[0].text[5:9])
)[0].outputs[0]
again = llm.generate("x" * 100, SamplingParams(max_tokens=1))
again = llm.generate("x" * 100, SamplingParams(max_tokens=1))[0]

conversation = [{"role": "user", "content": "Name a colour."}]
answers = llm.chat([conversation, conversation], greedy, use_tqdm=False)

vectors = [output.outputs.embedding for output in llm.embed(prompts)]
similarity = llm.score(prompts[0], prompts[1])[0].outputs.score
"""


@pytest.fixture(scope="module")
def script(tiny_llama: Path) -> Iterator[dict[str, Any]]:
    """The names of the script after its run."""
    names: dict[str, Any] = {"MODEL": str(tiny_llama)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", servd)
        exec(compile(SCRIPT, "script.py", "exec"), names)
    yield names
    names["llm"].close()


@torch.inference_mode()
def exact_logprobs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Return by transformers the log-probabilities after every token [num_tokens, vocab]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(torch.tensor([token_ids])).logits[0].log_softmax(dim=-1)


def check_position(position: dict[int, Any], exact: torch.Tensor, token_id: int, k: int) -> None:
    """Check the entries for the position's token and the k most likely, the token first."""
    likely = exact.topk(k).indices.tolist()
    assert list(position)[0] == token_id
    assert set(position) == {token_id, *likely}
    for other, entry in position.items():
        assert entry.logprob == pytest.approx(exact[other].item(), abs=1e-4)
        assert entry.rank == 1 + int((exact > exact[other]).sum())


def characters(text: str) -> str:
    """Return a text without what became of incomplete characters, which tokens may lack."""
    return text.replace("\ufffd", "")


def test_logprobs_are_dicts_by_token(script, tiny_llama):
    tokenizer = script["llm"].engine.processor.tokenizer
    for output, perplexity in zip(script["outputs"], script["perplexities"], strict=True):
        prompt = output.prompt_token_ids
        (choice,) = output.outputs
        exact = exact_logprobs(tiny_llama, [*prompt, *choice.token_ids])
        assert output.prompt_logprobs[0] is None
        for at, (token_id, position) in enumerate(
            zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ):
            check_position(position, exact[at], token_id, 2)
        sampled = []
        for at, (token_id, position) in enumerate(
            zip(choice.token_ids, choice.logprobs, strict=True), len(prompt) - 1
        ):
            check_position(position, exact[at], token_id, 3)
            sampled.append(position[token_id])
        total = sum(entry.logprob for entry in sampled)
        assert choice.cumulative_logprob == pytest.approx(total)
        decoded = "".join(entry.decoded_token for entry in sampled)
        assert characters(decoded) == characters(choice.text)
        rows = exact[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        assert perplexity == pytest.approx(math.exp(-rows.mean()), rel=1e-3)
        assert tokenizer.decode(choice.token_ids) == choice.text
    for tokens, choice in zip(script["best"], script["choices"], strict=True):
        assert characters("".join(tokens)) == characters(choice.text)


def test_zero_logprobs_are_the_sampled_token_alone(script):
    for choice in script["alone"].outputs:
        assert [list(position) for position in choice.logprobs] == [[i] for i in choice.token_ids]
        assert all(entry.rank >= 1 for position in choice.logprobs for entry in position.values())
    assert script["alone"].prompt_logprobs is None
    assert script["one_token"].prompt_logprobs == [None]
    assert script["one_token"].outputs[0].logprobs is None
    assert script["one_token"].outputs[0].cumulative_logprob is None


def test_the_rest_of_the_outputs(script):
    outputs = script["outputs"]
    choices = script["choices"]
    assert [output.prompt for output in outputs] == script["prompts"]
    assert [choice.index for choice in script["alone"].outputs] == [0, 1]
    assert {(choice.finish_reason, choice.stop_reason) for choice in choices} == {("length", None)}
    assert all(output.finished for output in outputs)
    whole = script["whole"].outputs[0].text
    stopped = script["stopped"]
    assert stopped.finish_reason == "stop" and stopped.stop_reason == whole[5:9]
    assert stopped.text == whole[: whole.index(whole[5:9])]
    assert script["again"].num_cached_tokens > 0 and outputs[0].num_cached_tokens == 0
    first, second = script["answers"]
    assert first.outputs[0].text == second.outputs[0].text
    assert first.outputs[0].logprobs == second.outputs[0].logprobs
    assert "Name a colour." in first.prompt
    copies = pickle.loads(pickle.dumps(outputs))
    assert [copy.outputs for copy in copies] == [output.outputs for output in outputs]
    assert copies[0].prompt_logprobs == outputs[0].prompt_logprobs


def test_embeddings_and_scores(script):
    first, second = map(torch.tensor, script["vectors"])
    cosine = torch.nn.functional.cosine_similarity(first, second, dim=0).item()
    assert script["similarity"] == pytest.approx(cosine, abs=1e-5)
