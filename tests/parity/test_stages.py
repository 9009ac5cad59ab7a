"""Stages of a pipeline give the tokens of one worker, whatever the scheduler has to do."""

import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from torch import Tensor

from servd.base.errors import EngineDeadError
from servd.checkpoint.hub import DEMO_MODEL, find_model
from servd.checkpoint.model_spec import STATE_LAYERS, read_spec
from servd.core.engine_core import EngineCore
from servd.core.executor import multiproc, uniproc
from servd.messages.engine import EngineCoreRequest
from servd.messages.params import SamplingParams, StructuredOutput
from servd.worker.batch.input_batch import InputBatch
from servd.worker.device.parallel import Parallel
from servd.worker.ops import native
from tests.core.engines import Log
from tests.core.structured_output.test_manager import Driver
from tests.parity.families import CASES, STATES, greedy
from tests.worker import stages
from tests.worker.driver import config_for
from tests.worker.recorded import use_recorded_runner

NUM_OUTPUTS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS)
BLOCK_SIZE = 4
FAST = {("gpt2", 0), ("gpt2", 1), ("llama", 0), ("gpt_oss", 0)}
MODELS = [name for name in CASES if name not in STATES]
# Parameters outside of layers.
EMBEDDING = {
    "llama": {"model.embed_tokens.weight"},
    "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
}
NORM = {
    "llama": {"model.norm.weight"},
    "gpt2": {"transformer.ln_f.weight", "transformer.ln_f.bias"},
}


def make_requests() -> list[EngineCoreRequest]:
    """Every second prompt has the same beginning; two draw their tokens."""
    draw = random.Random(5)
    shared = [draw.randrange(199) for _ in range(18)]
    seeded = SamplingParams(
        temperature=1.2, top_k=40, seed=3, repetition_penalty=1.2, max_tokens=NUM_OUTPUTS
    )
    return [
        EngineCoreRequest(
            str(i),
            shared[: 18 * (i % 2)] + [draw.randrange(199) for _ in range(draw.randint(1, 17))],
            seeded if i in (2, 5) else GREEDY,
        )
        for i in range(7)
    ]


def make_engine(executor_class: Any, folder: Path, **options: Any) -> EngineCore:
    config = config_for(folder, **options)
    spec = read_spec(folder)
    executor = executor_class(config, spec, lambda phase, fraction: None)
    return EngineCore(config, spec, executor, executor.start())


def cramped(folder: Path, **options: Any) -> dict[str, Any]:
    """Requests have to yield; each of two stages has half of the layers, or one more."""
    spec = read_spec(folder)
    kinds = spec.config.get("layer_types") or [""] * spec.num_layers
    num_stages = options["pipeline_parallel_size"]
    ranges = [Parallel(0, 1, i, num_stages).own_layers(spec.num_layers) for i in range(num_stages)]
    layers = max(sum(kinds[i] not in STATE_LAYERS for i in stage) for stage in ranges)
    num_caches = sum(kind not in STATE_LAYERS for kind in kinds)
    per_token = spec.kv_bytes_per_token(4) * layers // max(num_caches, 1)
    has_heads = "kv_lora_rank" not in spec.config  # else each rank keeps what all heads share
    num_parts = options.get("tensor_parallel_size", 1) if has_heads else 1
    memory = max(26 * BLOCK_SIZE * per_token // num_parts, 1)
    return options | {
        "executor": "multiproc",
        "kv_cache_memory": memory,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 24,
        "max_model_len": 64,
    }


def run(engine: EngineCore, requests: list[EngineCoreRequest]) -> Log:
    """Some requests come later, when prefixes of the others are known."""
    log = Log()
    for request in requests[:4]:
        engine.handle(request)
    for _ in range(9):
        log.step(engine)
    for request in requests[4:]:
        engine.handle(request)
    return log.run(engine)


def check(folder: Path, engine: EngineCore) -> None:
    """Its tokens are those of transformers and of one worker; it had to work for them."""
    requests = make_requests()
    try:
        log = run(engine, requests)
    finally:
        engine.executor.shutdown()
    spec = read_spec(folder)
    has_blocks = spec.num_heads > 0  # whose number is limited
    assert (log.total("num_preemptions") > 0) == has_blocks
    assert log.total("prefix_cache_hits") > 0 or spec.keeps_state
    whole = make_engine(uniproc.UniProcExecutor, folder)
    expected = run(whole, requests)
    whole.executor.shutdown()
    for request in requests:
        prompt = request.prompt_token_ids
        name = request.request_id
        assert log.token_ids(name) == expected.token_ids(name)
        if request.params == GREEDY:
            assert prompt + log.token_ids(name) == greedy(folder, prompt, NUM_OUTPUTS)


@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    ("model_type", "variant"),
    [
        pytest.param(name, variant, marks=[] if (name, number) in FAST else pytest.mark.slow)
        for name in MODELS
        for number, variant in enumerate(CASES[name])
    ],
)
def test_stages_equal_one_worker(checkpoints, model_type: str, variant: str, num_stages: int):
    folder = checkpoints(model_type, variant)
    options = cramped(folder, pipeline_parallel_size=num_stages)
    check(folder, make_engine(stages.Executor, folder, **options))


@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    ("model_type", "variant"),
    [
        pytest.param(name, variant, marks=[] if name == "granitemoehybrid" else pytest.mark.slow)
        for name in STATES
        for variant in CASES[name]
    ],
)
def test_stages_with_states_equal_one_worker(
    checkpoints, model_type: str, variant: str, num_stages: int
):
    """Of three stages, some have states alone, and no KV cache."""
    folder = checkpoints(model_type, variant)
    options = cramped(folder, pipeline_parallel_size=num_stages)
    check(folder, make_engine(stages.Executor, folder, **options))


@pytest.mark.parametrize(("model_type", "variant"), [("llama", "untied"), ("gpt2", "tied")])
def test_each_weight_is_in_the_stage_that_needs_it(checkpoints, model_type: str, variant: str):
    folder = checkpoints(model_type, variant)
    whole = make_engine(uniproc.UniProcExecutor, folder).executor.worker.runner.model
    engine = make_engine(stages.Executor, folder, **cramped(folder, pipeline_parallel_size=3))
    names_of_stages = [
        {name for name, _ in worker.runner.model.named_parameters()}
        for worker in engine.executor.workers
    ]
    # One layer each; the embedding is first, the final norm and the head are last.
    layers = [
        {int(part) for name in stage_names for part in name.split(".") if part.isdigit()}
        for stage_names in names_of_stages
    ]
    assert layers == [{0}, {1}, {2}]
    ends = [
        {name for name in stage_names if not re.search(r"\.\d\.", name)}
        for stage_names in names_of_stages
    ]
    first = EMBEDDING[model_type]
    norm = NORM[model_type]
    assert ends == [first, set(), norm | {"lm_head.weight"}]
    names = {name for name, _ in whole.named_parameters()}
    assert set().union(*names_of_stages) == names | {"lm_head.weight"}


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True])
def test_stages_whose_decode_steps_are_graphs(checkpoints, monkeypatch, is_async: bool):
    """As on CUDA: what is recorded reads and writes the same memory in each step."""
    use_recorded_runner(monkeypatch)
    folder = checkpoints("llama", "untied")
    options = cramped(folder, pipeline_parallel_size=2) | {"async_scheduling": is_async}
    engine = make_engine(stages.Executor, folder, **options)
    assert all(worker.runner.graphs.graphs for worker in engine.executor.workers)
    check(folder, engine)


def test_tokens_that_a_grammar_forces_reach_all_stages():
    """Several in a step, on a model whose decode steps are recorded graphs."""
    folder = Path(find_model(DEMO_MODEL))
    structure = StructuredOutput("regex", "(The quick brown fox |A lazy dog )[a-z]{4}[0-9]{2}")
    requests = [
        EngineCoreRequest(
            str(i),
            [5, 6, 7 + i],
            SamplingParams(temperature=1.0, seed=i, max_tokens=40, structured_output=structure),
        )
        for i in range(3)
    ]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = make_engine(uniproc.UniProcExecutor, folder, block_size=16)
    engine = make_engine(stages.Executor, folder, block_size=16, pipeline_parallel_size=2)
    sizes: list[int] = []
    engine.on_scheduled = lambda record: sizes.append(record.num_tokens)
    expected = Driver(whole, *requests).run()
    log = Driver(engine, *requests).run()
    for request in requests:
        name = request.request_id
        assert log.token_ids(name) == expected.token_ids(name)
        assert re.fullmatch(structure.value, tokenizer.decode(log.token_ids(name)).strip())
    assert max(sizes[1:]) > len(requests)  # some were forced
    if native.library() is not None:
        assert all(worker.runner.graphs.graphs for worker in engine.executor.workers)


def test_stages_in_processes_of_their_own_and_the_death_of_one(checkpoints):
    folder = checkpoints("llama", "untied")
    options = cramped(folder, pipeline_parallel_size=2)
    engine = make_engine(multiproc.MultiProcExecutor, folder, **options)
    executor = engine.executor
    assert isinstance(executor, multiproc.MultiProcExecutor)
    requests = make_requests()
    try:
        log = run(engine, requests)
        executor.workers[0].process.kill()
        engine.handle(EngineCoreRequest("late", [1, 2, 3], GREEDY))
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match="worker-0 ended|worker-1|gloo|[Cc]onnection"):
            log.run(engine)
        assert time.monotonic() - began < 10
    finally:
        executor.shutdown()
    for request in requests:
        if request.params == GREEDY:
            prompt = request.prompt_token_ids
            assert prompt + log.token_ids(request.request_id) == greedy(folder, prompt, NUM_OUTPUTS)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_fails_computes_nothing_apart(checkpoints, stage: int):
    """The others would continue with what it has not computed, or it with others' parts."""
    folder = checkpoints("llama", "untied")
    engine = make_engine(stages.Executor, folder, **cramped(folder, pipeline_parallel_size=2))
    runner = engine.executor.workers[stage].runner
    forward = runner.forward

    def fail(batch: InputBatch) -> Tensor:
        if len(batch.query_lens) > 1:
            raise MemoryError("no room for a tensor")
        return forward(batch)

    runner.forward = fail
    with pytest.raises(MemoryError, match="no room"):
        run(engine, make_requests())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_two_stages_of_two_ranks_equal_one_worker(checkpoints, model_type: str):
    folder = checkpoints(model_type, next(iter(CASES[model_type])))
    options = cramped(folder, pipeline_parallel_size=2, tensor_parallel_size=2)
    check(folder, make_engine(multiproc.MultiProcExecutor, folder, **options))
