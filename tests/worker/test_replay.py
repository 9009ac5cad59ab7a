"""A request that continues in another engine gets the tokens and bits that it would have got."""

import random
from typing import Any

import msgspec
import pytest

from servd.checkpoint.hub import DEMO_FOLDER
from servd.checkpoint.model_spec import read_spec
from servd.config import Config
from servd.config.machine import Machine
from servd.config.resolve import resolve
from servd.core.engine_core import EngineCore
from servd.core.executor import start_executor
from servd.messages.engine import EngineCoreRequest
from servd.messages.params import SamplingParams
from servd.worker.ops import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no CPU kernels")


def make_engine() -> EngineCore:
    """One of the demo model, with real blocks and steps small enough to cut prompts."""
    options = {"model": "demo", "device": "cpu", "kv_cache_memory": 1 << 26}
    spec = read_spec(str(DEMO_FOLDER))
    config = resolve(Config.load({**options, "max_num_batched_tokens": 96}), spec, Machine())
    executor, worker = start_executor(config, spec, lambda phase, progress: None)
    return EngineCore(config, spec, executor, worker)


def run(engine: EngineCore, requests: list[EngineCoreRequest]) -> dict[str, list[Any]]:
    """By request, each token with its log-probabilities."""
    results: dict[str, list[Any]] = {}
    for request in requests:
        engine.handle(request)
    while engine.has_work:
        for outputs in engine.step().values():
            for output in outputs.all_outputs:
                scores = output.logprobs or [None] * len(output.new_token_ids)
                results.setdefault(output.request_id, []).extend(
                    zip(output.new_token_ids, scores, strict=True)
                )
    return results


def make_request(
    name: str, draw: random.Random, size: int, length: int, **params: Any
) -> EngineCoreRequest:
    """A prompt of random tokens."""
    prompt = [draw.randrange(3, 3999) for _ in range(size)]
    sampling = SamplingParams(max_tokens=length, ignore_eos=True, **params)
    return EngineCoreRequest(name, prompt, sampling, eos_token_ids=[])


@pytest.mark.parametrize("size", [1, 40])
def test_replayed_at_any_position_a_request_gets_the_same_bits(size):
    draw = random.Random(size)
    living = make_engine()
    next_one = make_engine()
    request = make_request("r", draw, size, 120, temperature=1.0, seed=size, logprobs=2)
    whole = run(living, [request])["r"]
    # Beginnings and ends of blocks, and several positions at once: they find one another's blocks.
    for places in ([1], [15, 16, 17], [31], [64, 3, 100], [draw.randrange(120) for _ in range(8)]):
        replayed = [
            msgspec.structs.replace(
                request,
                request_id=f"{place}/{number}",
                output_token_ids={0: [token_id for token_id, _ in whole[:place]]},
                block_hashes=[],
            )
            for number, place in enumerate(places)
        ]
        further = [
            make_request(f"o{i}", draw, draw.randrange(1, 90), draw.randrange(1, 60), seed=i)
            for i in range(draw.randrange(5))
        ]
        both = draw.sample([*replayed, *further], len(replayed) + len(further))
        results = run(next_one, both)
        for replayed_request, place in zip(replayed, places, strict=True):
            assert results[replayed_request.request_id] == whole[place:], (place, len(further))
