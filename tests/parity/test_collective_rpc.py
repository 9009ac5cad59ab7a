"""EngineCore.collective_rpc with real workers: other weights, profiles."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from servd.base.errors import InvalidRequest
from servd.checkpoint.model_spec import read_spec
from servd.core.engine_core import EngineCore
from servd.core.executor import load_executor
from servd.messages.engine import EngineCoreRequest
from servd.messages.params import SamplingParams
from servd.worker import worker
from servd.worker.runner.cpu_model_runner import CPUModelRunner
from tests.core.engines import Log
from tests.parity.families import CASES, greedy
from tests.worker.driver import config_for

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
NUM_OUTPUTS = 8


def with_noise(folder: Path, other: Path) -> Path:
    """Copy a checkpoint, with other weights."""
    shutil.copytree(folder, other)
    tensors = load_file(other / "model.safetensors")
    torch.manual_seed(1)
    noisy = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in tensors.items()}
    save_file(noisy, other / "model.safetensors", {"format": "pt"})
    return other


def answer(engine: EngineCore, name: str) -> list[int]:
    log = Log()
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS)
    engine.handle(EngineCoreRequest(name, PROMPT, params))
    log.run(engine)
    return PROMPT + log.token_ids(name)


@pytest.mark.parametrize(("executor", "num_ranks"), [("uniproc", 1), ("multiproc", 2)])
def test_answers_after_update_weights_are_of_the_new_checkpoint(
    checkpoints, tmp_path: Path, monkeypatch, executor: str, num_ranks: int
):
    first = tmp_path / "first"
    shutil.copytree(checkpoints("llama", next(iter(CASES["llama"]))), first)
    second = with_noise(first, tmp_path / "second")
    other = tmp_path / "other"
    shutil.copytree(first, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    expected = greedy(second, PROMPT, NUM_OUTPUTS)
    assert expected != greedy(first, PROMPT, NUM_OUTPUTS)

    options = {"executor": executor, "tensor_parallel_size": num_ranks}
    config = config_for(first, kv_cache_memory=None, **options)
    workers = load_executor(executor)(config, read_spec(first), lambda phase, progress: None)
    engine = EngineCore(config, read_spec(first), workers, workers.start())
    try:
        assert answer(engine, "before") == greedy(first, PROMPT, NUM_OUTPUTS)
        # Other programs may have taken what memory was free.
        monkeypatch.setattr(CPUModelRunner, "kv_cache_memory", lambda runner: 0)
        assert engine.collective_rpc("update_weights", [str(second)]) == [None] * num_ranks
        assert answer(engine, "after") == expected
        for folder, reason in ((other, "rms_norm_eps 0.5"), (tmp_path / "none", "no config.json")):
            with pytest.raises(InvalidRequest, match=reason):
                engine.collective_rpc("update_weights", [str(folder)])
        assert engine.collective_rpc("start_profile", []) == [None] * num_ranks
        assert answer(engine, "profiled") == expected
        traces = engine.collective_rpc("stop_profile", [])
        assert len(traces) == num_ranks
        for trace in traces:
            assert trace is not None and json.loads(Path(trace).read_text())["traceEvents"]
            shutil.rmtree(Path(trace).parent)
        engine.sleep()
        engine.wake_up()
        assert answer(engine, "awake") == expected
        tensors = load_file(second / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, second / "model.safetensors", {"format": "pt"})
        with pytest.raises(InvalidRequest, match="model.norm.weight is absent"):
            engine.collective_rpc("update_weights", [str(second)])
    finally:
        engine.executor.shutdown()


def test_a_profile_that_nobody_stops_ends(checkpoints, monkeypatch):
    first = checkpoints("llama", next(iter(CASES["llama"])))
    config = config_for(first)
    workers = load_executor("uniproc")(config, read_spec(first), lambda phase, progress: None)
    engine = EngineCore(config, read_spec(first), workers, workers.start())
    num_events = []
    try:
        for num_steps in (2, 4, 1000):
            monkeypatch.setattr(worker, "MAX_PROFILED_STEPS", num_steps)
            engine.collective_rpc("start_profile", [])
            answer(engine, str(num_steps))
            (trace,) = engine.collective_rpc("stop_profile", [])
            assert trace is not None
            num_events.append(len(json.loads(Path(trace).read_text())["traceEvents"]))
            shutil.rmtree(Path(trace).parent)
    finally:
        engine.executor.shutdown()
    assert num_events[1] > 1.3 * num_events[0] and num_events[2] > 1.3 * num_events[1]
