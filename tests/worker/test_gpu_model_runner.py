"""On a CUDA device: graphs, steps in flight and memory."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from servd.base import plugins
from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import read_spec
from servd.core.engine_core import EngineCore
from servd.core.executor.uniproc import UniProcExecutor
from servd.messages.engine import EngineCoreRequest
from servd.messages.params import SamplingParams
from tests.core.engines import Log
from tests.worker.driver import Driver, config_for
from tests.worker.recorded import write_config
from tests.worker.test_graph_runner import run_steps

pytestmark = pytest.mark.gpu

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
ON_DEVICE = {"device": "cuda", "load_format": "dummy", "block_size": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_config(tmp_path, **SHAPE)


def with_backend(name: str, folder: Path, **options: object):
    """`run_steps` with an attention backend; skips with its reason where it cannot run."""
    try:
        return run_steps(folder, **ON_DEVICE | {"attention_backend": name} | options)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", plugins.names("servd.worker.attention"))
def test_graphs_compute_what_is_computed_without(folder: Path, name: str, dtype: str):
    graphs, _, logits = with_backend(name, folder, dtype=dtype)
    if graphs.worker.runner.graphs is None:
        pytest.skip(f"{name} cannot be captured")
    eager, _, expected = with_backend(name, folder, dtype=dtype, enforce_eager=True)
    assert eager.worker.runner.graphs is None and len(graphs.worker.runner.graphs.graphs) > 1
    # The first logits of each request: later ones follow its own tokens, which in bfloat16 may
    # differ.
    close = {"float32": 1e-4, "bfloat16": 5e-2}[dtype]
    torch.testing.assert_close(logits[0], expected[0], atol=close, rtol=0)
    if dtype == "float32":
        torch.testing.assert_close(torch.stack(logits), torch.stack(expected), atol=close, rtol=0)


def serve(folder: Path, depth: int, **options: object) -> list[list[int]]:
    """Eight requests through the engine, with preemption."""
    spec = read_spec(folder)
    config = config_for(
        folder,
        async_scheduling=depth == 2,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        max_model_len=128,
        dtype="float32",
        kv_cache_memory=14 * 16 * spec.kv_bytes_per_token(4),
        **ON_DEVICE | options,
    )
    executor = UniProcExecutor(config, spec, lambda *_: None)
    engine = EngineCore(config, spec, executor, executor.start())
    log = Log()
    for i in range(8):
        params = SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=40,
            min_tokens=5,
            repetition_penalty=1.3,
            top_p=0.9,
            logprobs=1,
        )
        engine.handle(EngineCoreRequest(str(i), [i, 8, 9] * (2 * i + 1), params, eos_token_ids=[3]))
    log.run(engine)
    assert log.total("num_preemptions") > 0
    return [log.token_ids(str(i)) for i in range(8)]


def test_neither_depth_nor_graphs_change_an_output(folder: Path):
    expected = serve(folder, 1, enforce_eager=True)
    assert serve(folder, 2, enforce_eager=True) == expected
    assert serve(folder, 1) == expected
    assert serve(folder, 2) == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_change_no_output(folder: Path, depth: int):
    expected = serve(folder, depth)
    assert serve(folder, depth, speculative_config={"method": "ngram"}) == expected


def test_a_decode_step_never_waits_for_the_device(folder: Path, sync_mode):
    driver = Driver(config_for(folder, **ON_DEVICE))
    slots = [driver.add([1, 2, 3]), driver.add([4, 5])]
    driver.generate(slots, 3)
    runner = driver.worker.runner
    sample = runner.sample_tokens

    def watched(bitmask=None) -> SimpleNamespace:
        output = sample(bitmask)
        with sync_mode("default"):  # the collect may wait
            done = output.result()
        return SimpleNamespace(result=lambda: done)

    runner.sample_tokens = watched
    with sync_mode("error"):
        driver.generate(slots, 6)


def test_the_memory_profile_covers_graphs_and_the_largest_step(tmp_path: Path):
    share = 0.1
    gc.collect()  # what other tests have left
    config = config_for(
        write_config(tmp_path, **SHAPE | {"num_key_value_heads": 4, "head_dim": 128}),
        kv_cache_memory=None,
        gpu_memory_utilization=share,
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        max_model_len=8192,
        **ON_DEVICE,
    )
    driver = Driver(config)
    runner = driver.worker.runner
    runner._launch(256, 16, 0, runner.sampler.costliest)
    runner._sample_all(256)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    assert total - free <= share * total
    assert sum(part.nbytes for part in runner.kv_caches) > 0.5 * share * total, (
        "and not much is left unused"
    )
