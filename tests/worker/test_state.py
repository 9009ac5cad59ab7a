"""States beside the KV cache: right whoever had the slot, whatever a step is cut into."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from servd.base.errors import UnsupportedModel
from servd.checkpoint.model_spec import read_spec
from servd.config import Config
from servd.core.engine_core import EngineCore
from servd.core.executor.uniproc import UniProcExecutor
from servd.messages.engine import AbortRequests, EngineCoreRequest
from servd.messages.params import SamplingParams, StructuredOutput
from servd.worker.device.parallel import Parallel
from servd.worker.layers import state
from servd.worker.loading.model_loader import build_model
from servd.worker.models.llama import LlamaMLP
from tests.core.engines import Log
from tests.core.test_overlap import with_grammars
from tests.parity.families import CASES, STATES, greedy, make_checkpoint
from tests.worker.driver import Driver, config_for
from tests.worker.test_overlap import ThreadedExecutor

pytestmark = pytest.mark.usefixtures("poisoned")
MODEL = "qwen3_5_text"
VARIANT = "of four layers"
BLOCK_BYTES = 2 * 4 * 2 * 16 * 4  # keys and values of one layer, by hand
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """With a tokenizer, for grammars."""
    options = CASES[MODEL][VARIANT] | {"vocab_size": 512}
    made = make_checkpoint(tmp_path_factory.mktemp(MODEL), MODEL, options)
    shutil.copy(tiny_llama / "tokenizer.json", made)
    return made


def config_of(folder: Path, num_blocks: int = 200, **options: Any) -> Config:
    defaults = {"max_model_len": 48, "kv_cache_memory": num_blocks * BLOCK_BYTES}
    return config_for(folder, **defaults | options)


def engine_of(folder: Path, depth: int = 1, **options: Any) -> EngineCore:
    """A whole engine in this process."""
    config = config_of(folder, async_scheduling=depth > 1, **options)
    spec = read_spec(folder)
    kind = ThreadedExecutor if depth > 1 else UniProcExecutor
    executor = kind(config, spec, lambda *_: None)
    return EngineCore(config, spec, executor, executor.start())


def requests(*lengths: int, params: SamplingParams = GREEDY) -> list[EngineCoreRequest]:
    draw = random.Random(3)
    prompts = [[draw.randrange(199) for _ in range(length)] for length in lengths]
    return [EngineCoreRequest(str(i), p, params, eos_token_ids=[]) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("depth", [1, 2])
def test_stateful_models_equal_transformers_under_load(folder: Path, depth):
    engine = engine_of(folder, depth, num_blocks=22, max_num_seqs=3, max_num_batched_tokens=24)
    all_requests = requests(30, 28, 3, 33, 1, 33, 12)
    log = Log()
    for request in all_requests[:4]:
        engine.handle(request)
    for _ in range(4):
        log.step(engine)
    engine.handle(AbortRequests(["1"]))
    for request in all_requests[4:]:
        engine.handle(request)
    several = msgspec.structs.replace(GREEDY, n=2)
    [twice] = requests(17, params=several)
    twice = msgspec.structs.replace(twice, request_id="both")
    engine.handle(twice)
    log.run(engine)
    assert log.total("num_preemptions") > 0
    for request in [*all_requests[:1], *all_requests[2:]]:
        prompt = request.prompt_token_ids
        assert prompt + log.token_ids(request.request_id) == greedy(folder, prompt, 9)
    prompt = twice.prompt_token_ids
    assert [prompt + log.token_ids(choice_id) for choice_id in twice.choice_ids] == 2 * [
        greedy(folder, prompt, 9)
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_may_begin_at_every_border(folder: Path, depth):
    engine = engine_of(folder, depth, state_checkpoint_interval=4, max_num_batched_tokens=11)
    [request] = requests(38)
    engine.handle(request)
    Log().run(engine)
    for length in range(1, 38, 3):
        prompt = [*request.prompt_token_ids[:length], 7]
        name = f"after {length}"
        engine.handle(msgspec.structs.replace(request, request_id=name, prompt_token_ids=prompt))
        log = Log().run(engine)
        assert log.outputs[name][0].num_cached_tokens == length // 4 * 4
        assert prompt + log.token_ids(name) == greedy(folder, prompt, 9)


@pytest.mark.parametrize("model_type", STATES)
def test_cached_states_give_the_same_bits(tmp_path: Path, model_type: str):
    """At every border, whatever the prompt before it was cut into."""
    options = next(iter(CASES[model_type].values()))
    folder = make_checkpoint(tmp_path, model_type, options)
    sizes = {"block_size": 16, "max_model_len": 96, "num_blocks": 2000}
    cached = engine_of(folder, state_checkpoint_interval=16, max_num_batched_tokens=23, **sizes)
    plain = engine_of(folder, enable_prefix_caching=False, max_num_batched_tokens=96, **sizes)
    params = msgspec.structs.replace(GREEDY, logprobs=3)
    [request] = requests(70, params=params)
    cached.handle(request)
    Log().run(cached)
    for length in (1, 15, 16, 17, 33, 48, 64, 69):
        prompt = [*request.prompt_token_ids[:length], 7]
        outputs = []
        for engine in (plain, cached):
            name = f"{length}"
            message = msgspec.structs.replace(request, request_id=name, prompt_token_ids=prompt)
            engine.handle(message)
            log = Log().run(engine)
            outputs.append([output.logprobs for output in log.outputs[name]])
        assert log.outputs[name][0].num_cached_tokens == length // 16 * 16
        assert outputs[0] == outputs[1]
        assert prompt + log.token_ids(name) == greedy(folder, prompt, 9)


def test_a_conversation_outlives_its_engine(folder: Path, tmp_path: Path):
    """Of each turn, only what is new and the last block are computed."""
    options: dict[str, Any] = {"max_model_len": 120, "kv_cache_dir": str(tmp_path)}
    text: list[int] = []
    for turn in range(6):
        if turn % 3 == 0:
            engine = engine_of(folder, max_num_seqs=2, **options)
            connector = engine.scheduler.kv_cache.connector
            connector.disk.is_open.wait()
        [request] = requests(10)
        prompt = [*text, *request.prompt_token_ids]
        engine.handle(msgspec.structs.replace(request, prompt_token_ids=prompt))
        log = Log().run(engine)
        expected = greedy(folder, prompt, 9)
        assert prompt + log.token_ids("0") == expected
        if text:
            assert log.outputs["0"][0].num_cached_tokens >= len(text) - 1 - 4
        text = expected
        while connector.wait():
            engine.step()
        connector.flush()


def test_a_request_goes_on_in_another_engine(folder: Path):
    [request] = requests(21)
    expected = greedy(folder, request.prompt_token_ids, 9)
    begun = msgspec.structs.replace(request, output_token_ids={0: expected[21:26]})
    engine = engine_of(folder)
    engine.handle(begun)
    assert Log().run(engine).token_ids("0") == expected[26:]


def test_what_a_grammar_forces_is_not_drafted(folder: Path):
    """Several tokens of a request in rows of their own would all begin with one state."""
    key = "customer_identifier"
    schema = {"type": "object", "properties": {key: {"type": "boolean"}}, "required": [key]}
    form = StructuredOutput("json", json.dumps(schema | {"additionalProperties": False}))
    params = msgspec.structs.replace(GREEDY, max_tokens=25, structured_output=form)
    [request] = requests(11, params=params)
    results = []
    for jumps in (True, False):
        engine = engine_of(folder, max_num_batched_tokens=64)
        if not jumps:
            engine.grammars.grammar_tokens = dict
        settle = with_grammars(engine)
        engine.handle(request)
        settle()
        results.append(Log().run(engine).token_ids("0"))
    assert results[0] == results[1] and len(results[0]) > 4


def test_a_step_that_fails_half_way_ends_the_engine(folder: Path, monkeypatch):
    """The layers before it have changed their states: no request may compute the step again."""
    engine = engine_of(folder)
    last = engine.executor.worker.runner.model.model.layers[-1].mlp

    def checked(self: LlamaMLP, x: Any) -> Any:
        if self is last:
            raise MemoryError("no room for a tensor")
        return forward(self, x)

    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", checked)
    engine.handle(requests(5)[0])
    with pytest.raises(MemoryError, match="no room"):
        Log().run(engine)


def test_states_have_columns_of_their_own_in_a_row_for_each_slot(folder: Path):
    driver = Driver(config_of(folder, max_num_seqs=3))
    runner = driver.worker.runner
    layers = [module for module in runner.model.modules() if isinstance(module, state.State)]
    columns = [range(module.first, module.first + module.num_columns) for module in layers]
    assert [number for module in columns for number in module] == [*range(columns[-1].stop)]
    assert len(layers) == 6 and runner.states.state_memory.live.shape == (4, columns[-1].stop)
    # 2 heads of keys of 12 numbers, 6 of values of 10; 3 inputs of the convolution.
    assert {len(part) for part in columns} == {3 * (2 * 24 + 60), 6 * 12 * 10}


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *(("mamba2", name) for name in ("num_heads", "n_groups", "state_size", "conv_kernel")),
        *(("qwen3_next", f"linear_num_{name}_heads") for name in ("key", "value")),
        *(("qwen3_next", f"linear_{name}_head_dim") for name in ("key", "value")),
        ("qwen3_next", "linear_conv_kernel_dim"),
        ("lfm2", "conv_L_cache"),
    ],
)
@pytest.mark.parametrize("size", [0, -2])
def test_states_without_numbers_are_refused(tmp_path: Path, model_type, name, size):
    options = next(iter(CASES[model_type].values()))
    spec = read_spec(make_checkpoint(tmp_path, model_type, options))
    spec = msgspec.structs.replace(spec, config=spec.config | {name: size})
    with pytest.raises(UnsupportedModel, match=r"config\.json: "):
        build_model(spec, torch.float32, torch.device("cpu"), Parallel())
