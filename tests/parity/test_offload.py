"""The tiers behind the KV cache with real models: of two ranks, and after a restart."""

import random
import time
from pathlib import Path

import pytest

from servd.checkpoint.model_spec import read_spec
from servd.core.engine_core import EngineCore
from servd.core.executor import multiproc, uniproc
from servd.core.kv_cache.connector import loads
from servd.core.kv_cache.connector.costs import LoadCosts
from servd.core.kv_cache.connector.offload import OffloadConnector
from servd.messages.engine import EngineCoreRequest
from servd.messages.params import SamplingParams
from tests.core.engines import Log
from tests.worker.driver import config_for

pytestmark = pytest.mark.slow
GPT2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}


def run(executor_class, folder: Path, requests: list[EngineCoreRequest], **options: object) -> Log:
    """A life of an engine, which ends when what it has is written."""
    config = config_for(folder, **options)
    spec = read_spec(folder)
    executor = executor_class(config, spec, lambda phase, fraction: None)
    try:
        engine = EngineCore(config, spec, executor, executor.start())
        log = Log()
        connector = engine.scheduler.kv_cache.connector
        if isinstance(connector, OffloadConnector):
            connector.flush()
        for request in requests:
            began = time.perf_counter()
            engine.handle(request)
            while not log.outputs[request.request_id]:
                log.step(engine)
            log.seconds = time.perf_counter() - began  # to the first token
        log.run(engine)
        if isinstance(connector, OffloadConnector):
            connector.flush()
        return log
    finally:
        executor.shutdown()


def test_each_rank_gets_its_part_of_a_block_back(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(LoadCosts, "is_worth_loading", lambda self, place: True)
    monkeypatch.setattr(loads, "MIN_TIMEOUT_NS", 60_000_000_000)
    folder = checkpoints("llama", "untied")
    draw = random.Random(2)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = [[draw.randrange(199) for _ in range(50)] for _ in range(4)] * 2
    requests = [EngineCoreRequest(str(i), prompt, greedy) for i, prompt in enumerate(prompts)]
    expected = run(uniproc.UniProcExecutor, folder, requests)
    options = {
        "executor": "multiproc",
        "tensor_parallel_size": 2,
        "max_num_seqs": 2,
        "max_model_len": 80,
        "kv_cache_dir": str(tmp_path),
        "kv_offloading_size": 0.01,
        "kv_cache_memory": 24 * 4 * read_spec(folder).kv_bytes_per_token(4) // 2,
    }
    for _ in range(2):
        log = run(multiproc.MultiProcExecutor, folder, requests, **options)
        for request in requests:
            name = request.request_id
            assert log.token_ids(name) == expected.token_ids(name)
        assert log.total("external_prefix_cache_hits") > 0


def test_the_first_token_of_a_known_prompt_comes_in_a_tenth_of_the_time(checkpoints, tmp_path):
    """900 tokens, a model of GPT-2's size in float32, another engine each time."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "layer_norm_epsilon": 1e-5, '
        + ", ".join(f'"{name}": {value}' for name, value in GPT2.items())
        + "}"
    )
    draw = random.Random(3)
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    warm_up, prompt = ([draw.randrange(50000) for _ in range(n)] for n in (100, 900))
    requests = [EngineCoreRequest("warm", warm_up, greedy), EngineCoreRequest("a", prompt, greedy)]
    options = {
        "load_format": "dummy",
        "max_model_len": 1024,
        "block_size": 16,
        "kv_cache_memory": 1 << 28,
        "kv_cache_dir": str(tmp_path / "kv"),
        "max_num_batched_tokens": 512,
    }
    cold, again = (run(uniproc.UniProcExecutor, folder, requests, **options) for _ in range(2))
    assert again.token_ids("a") == cold.token_ids("a")
    assert again.outputs["a"][0].num_external_tokens == 56 * 16
    assert again.seconds <= 0.1 * cold.seconds, (again.seconds, cold.seconds)
