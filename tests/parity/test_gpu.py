"""On a CUDA device: greedy tokens are transformers' in float32, and nearly always in bfloat16."""

import pytest
import torch

from servd.base import plugins
from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import read_spec
from servd.core.engine_core import EngineCore
from servd.core.executor.uniproc import UniProcExecutor
from tests.core.engines import Log
from tests.parity.families import CASES, LLAMA, greedy, logits_of, make_checkpoint
from tests.parity.test_engine import NUM_OUTPUTS, SamplingParams, make_requests
from tests.worker.driver import config_for

pytestmark = pytest.mark.gpu

# The tiny families, and one with heads of a usual size.
FOLDERS = [
    ("gpt2", "tied"),
    ("llama", "untied"),
    ("mistral", "window"),
    ("qwen2", "tied"),
    ("qwen3", "head_dim"),
    ("llama", "wide heads"),
]


@pytest.fixture(scope="module", params=FOLDERS, ids="-".join)
def folder(request, checkpoints, tmp_path_factory):
    model_type, variant = request.param
    if variant in CASES[model_type]:
        return checkpoints(model_type, variant)
    return make_checkpoint(tmp_path_factory.mktemp("wide"), "llama", LLAMA | {"head_dim": 64})


def generate(folder, backend: str, dtype: str, depth: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs, through chunked prompts, cached prefixes and a small cache."""
    spec = read_spec(folder)
    config = config_for(
        folder,
        device="cuda",
        dtype=dtype,
        attention_backend=backend,
        async_scheduling=depth == 2,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_model_len=64,
        block_size=16,
        kv_cache_memory=12 * 16 * spec.kv_bytes_per_token(2 if dtype == "bfloat16" else 4),
    )
    executor = UniProcExecutor(config, spec, lambda *_: None)
    try:
        engine = EngineCore(config, spec, executor, executor.start())
    except ConfigError as error:
        pytest.skip(str(error))
    requests = make_requests([SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS)] * 8)
    for request in requests:
        engine.handle(request)
    log = Log().run(engine)
    return [(request.prompt_token_ids, log.token_ids(request.request_id)) for request in requests]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("backend", plugins.names("servd.worker.attention"))
def test_float32_gives_the_tokens_of_transformers(folder, backend: str, depth: int):
    for prompt, output in generate(folder, backend, "float32", depth):
        assert prompt + output == greedy(folder, prompt, NUM_OUTPUTS)


@pytest.mark.parametrize("backend", plugins.names("servd.worker.attention"))
def test_bfloat16_agrees(folder, backend: str):
    num_tokens = num_equal = 0
    for prompt, output in generate(folder, backend, "bfloat16", 2):
        likeliest = logits_of(folder, prompt + output)[len(prompt) - 1 : -1].argmax(-1)
        num_equal += int((likeliest == torch.tensor(output)).sum())
        num_tokens += len(output)
    assert num_equal >= 0.9 * num_tokens
