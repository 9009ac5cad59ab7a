"""LLM.embed, with the engine in this process and in its own; generation is in the examples of docs/offline.md."""

from __future__ import annotations

import struct

import pytest

from servd import LLM, PoolingParams, SamplingParams
from servd.core.executor.fake import next_state, vector
from servd.errors import InvalidRequest


def expected(text: str, params: PoolingParams) -> list[float]:
    """The fake model's vector of a text."""
    state = 0
    for byte in text.encode():
        state = next_state(state, byte)
    data = vector(state, params, 16)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


@pytest.mark.parametrize("separate_process", [False, True])
def test_embed(separate_process):
    llm = LLM(executor="fake", use_tqdm=False, separate_process=separate_process)
    try:
        texts = [f"text {i} " * (1 + i) for i in range(20)]
        assert llm.embed(texts) == [expected(text, PoolingParams()) for text in texts]
        params = [PoolingParams(dimensions=4), PoolingParams(pooling="mean", normalize=False)]
        assert llm.embed(["a", [98, 99]], params) == [expected("a", params[0]), expected("bc", params[1])]
        with pytest.raises(InvalidRequest, match="dimensions"):
            llm.embed("a", PoolingParams(dimensions=17))
        (output,) = llm.generate("a", SamplingParams(max_tokens=0, prompt_logprobs=0))
        assert output.outputs[0].text == "" and output.outputs[0].prompt_logprobs is None
        (output,) = llm.generate("abc", SamplingParams(max_tokens=2, prompt_logprobs=0))
        assert [position.token_ids[0] for position in output.outputs[0].prompt_logprobs] == [98, 99]
    finally:
        llm.close()
