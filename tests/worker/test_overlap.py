"""Steps in flight with the real sampler: what the device keeps is in time for the next step."""

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from servd.checkpoint.model_spec import read_spec
from servd.core.engine_core import EngineCore
from servd.core.executor.uniproc import UniProcExecutor
from servd.messages.engine import AbortRequests, EngineCoreRequest, GrammarOutput, SchedulerOutput
from servd.messages.params import SamplingParams, StructuredOutput
from tests.core.engines import Log
from tests.core.test_overlap import outputs, with_grammars
from tests.worker.driver import config_for
from tests.worker.recorded import write_config

GRAMMAR = StructuredOutput("regex", "[a-z]{3,6}-[0-9]{2}")


class ThreadedExecutor(UniProcExecutor):
    """The worker runs on a thread, as on a device: the host continues before it computes."""

    def start(self):
        self.stream = ThreadPoolExecutor(1, "device")
        return super().start()

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self.launched = self.stream.submit(super().execute_model, scheduled)

    def sample_tokens(self, bitmask: GrammarOutput | None = None):
        launched = self.launched
        sample = super().sample_tokens

        def run():
            launched.result()
            return sample(bitmask).result()

        return self.stream.submit(run)


def make_request(request_id: int, draw: random.Random) -> EngineCoreRequest:
    """Random features, so that most steps use all of them somewhere."""
    prompt = [draw.randrange(199) for _ in range(draw.randint(1, 20))]
    max_tokens = draw.randint(4, 16)
    params = SamplingParams(
        temperature=draw.choice([0.0, 0.8, 1.5]),
        seed=request_id,
        max_tokens=max_tokens,
        min_tokens=draw.randint(0, max_tokens),
        stop_token_ids=draw.sample(range(199), 40),
        repetition_penalty=draw.choice([1.0, 1.4]),
        frequency_penalty=draw.choice([0.0, 1.0]),
        presence_penalty=draw.choice([0.0, 0.5]),
        top_k=draw.choice([0, 20]),
        top_p=draw.choice([1.0, 0.8]),
        logit_bias=draw.choice([{}, {5: 3.0}]),
        bad_words_token_ids=draw.choice([[], [[5, 6], [7]]]),
        logprobs=draw.choice([None, 2]),
        prompt_logprobs=draw.choice([None, None, 1]),
    )
    return EngineCoreRequest(str(request_id), prompt, params)


def serve(
    folder: Path,
    requests: list[EngineCoreRequest],
    depth: int,
    num_blocks: int,
    aborts: bool,
    jumps_ahead: bool = True,
    **options: Any,
) -> Log:
    """Requests come in three waves, one is aborted; without `jumps_ahead` no grammar drafts."""
    spec = read_spec(folder)
    defaults = {
        "load_format": "dummy",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "max_model_len": 48,
        "kv_cache_memory": num_blocks * 4 * spec.kv_bytes_per_token(4),
    }
    config = config_for(folder, async_scheduling=depth > 1, **(defaults | options))
    executor = ThreadedExecutor(config, spec, lambda *_: None)
    engine = EngineCore(config, spec, executor, executor.start())
    engine.depth = depth
    if not jumps_ahead:
        engine.grammars.grammar_tokens = dict
    settle = with_grammars(engine)
    log = Log()
    for wave in (requests[:3], requests[3:4], requests[4:]):
        for request in wave:
            engine.handle(request)
        settle()
        for _ in range(4):
            log.step(engine)
        if aborts:
            engine.handle(AbortRequests(["1"]))
    return log.run(engine, max_steps=max(2000, 30 * len(requests)))


@pytest.mark.parametrize("seed", [0, 1])
def test_no_depth_changes_what_is_sampled(tmp_path: Path, seed: int):
    folder = write_config(tmp_path)
    draw = random.Random(seed)
    requests = [make_request(i, draw) for i in range(7)]
    expected = check_depths(folder, requests)
    assert {output[-1].finish_reason for output in expected.outputs.values()} == {"stop", "length"}


def test_no_depth_changes_what_a_grammar_allows(tiny_llama: Path):
    """Beside free requests, with all that changes what the bitmask leaves."""
    draw = random.Random(0)
    tokenizer = Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))
    requests = []
    for i in range(7):
        params = SamplingParams(
            temperature=draw.choice([0.0, 1.5]),
            seed=i,
            max_tokens=16,
            repetition_penalty=draw.choice([1.0, 1.4]),
            logit_bias=draw.choice([{}, {5: 3.0}]),
            structured_output=GRAMMAR if i % 3 else None,
        )
        requests.append(
            EngineCoreRequest(
                str(i), [draw.randrange(199) for _ in range(20)], params, eos_token_ids=[3]
            )
        )
    expected = check_depths(tiny_llama, requests)
    for request in requests:
        if request.params.structured_output is not None:
            text = tokenizer.decode(expected.token_ids(request.request_id))
            assert re.fullmatch(GRAMMAR.value, text)


def check_depths(folder: Path, requests: list[EngineCoreRequest]) -> Log:
    """Outputs one step after the other are those at all depths, aborted and preempted."""
    whole_log = serve(folder, requests, 1, 100, aborts=False, jumps_ahead=False)
    num_preemptions = 0
    for depth in (1, 2, 3, 4):
        log = serve(folder, requests, depth, 12, aborts=True)
        num_preemptions += log.total("num_preemptions")
        for request_id in log.outputs:
            got, whole = (
                [(token_id, bool(logprobs), end) for token_id, logprobs, end in log_outputs]
                for log_outputs in (outputs(log, request_id), outputs(whole_log, request_id))
            )
            assert got == whole or (request_id == "1" and got == whole[: len(got)])
        assert len(log.token_ids("1")) < len(whole_log.token_ids("1")), "aborted in its midst"
    assert num_preemptions > 0
    return whole_log
