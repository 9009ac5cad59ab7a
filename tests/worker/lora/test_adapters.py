"""Adapters in a worker: what is checked before weights are read, and agreement of ranks."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from servd.base.errors import ConfigError, InvalidRequest
from servd.checkpoint.model_spec import read_spec
from servd.messages.adapter import Adapter
from servd.messages.engine import NewRequest
from servd.worker.loading import model_loader
from servd.worker.lora.adapters import AdapterSlots
from servd.worker.worker import Worker
from tests.adapters import Q_PROJ, write_adapter
from tests.parity.adapters import store
from tests.parity.families import CASES, make_checkpoint
from tests.worker.driver import GREEDY, config_for
from tests.worker.recorded import Strict


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "llama", "llama", CASES["llama"]["untied"])


def worker_of(folder: Path, **options) -> Worker:
    config = config_for(folder, enable_lora=True, **options)
    return Worker(config, read_spec(folder), 0, lambda *_: None)


def test_an_adapter_of_another_model_is_refused_before_weights_are_read(
    tmp_path, llama, monkeypatch
):
    monkeypatch.setattr(model_loader, "load_weights", lambda *_: pytest.fail("too late"))
    adapter = write_adapter(tmp_path / "adapter")  # 8 inputs, 6 outputs
    with pytest.raises(ConfigError, match=r"sql: .*q_proj has 8 inputs and 6 outputs, but the"):
        worker_of(llama, lora_modules=[f"sql={adapter}"]).load_model()


def make_adapters(tmp_path: Path, llama: Path) -> tuple[AdapterSlots, Adapter]:
    """The adapters of a loaded model, and one that fits and is not loaded yet."""
    worker = worker_of(llama)
    worker.load_model()
    adapters = worker.runner.adapters
    assert adapters is not None
    inputs, outputs = adapters.layers["layers.0.self_attn.q_proj"]
    shapes = {f"{Q_PROJ}.lora_A.weight": (4, inputs), f"{Q_PROJ}.lora_B.weight": (outputs, 4)}
    stored = store(tmp_path, sql=write_adapter(tmp_path / "sql", shapes=shapes))
    return adapters, stored["sql"]


@dataclass
class OtherRank:
    """The other of two ranks."""

    fails: bool = True

    def is_any(self, value: bool) -> bool:
        return value or self.fails


def test_what_one_rank_cannot_load_is_an_error_on_all(tmp_path: Path, llama: Path):
    adapters, adapter = make_adapters(tmp_path, llama)
    request = NewRequest(2, [1, 2], 2, 0, [0], GREEDY, adapter=adapter)
    adapters.parallel = other = OtherRank()  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="sql could not be loaded on all ranks"):
        adapters.add(request)
    assert not adapters.users and adapters.adapter_slot_of[2] == -1
    other.fails = False
    adapters.add(request)
    assert adapters.users.total() == 1


def test_a_request_of_a_loaded_adapter_waits_for_no_device(tmp_path: Path, llama: Path):
    """Its steps in flight would end first."""
    adapters, adapter = make_adapters(tmp_path, llama)
    requests = [NewRequest(i, [1, 2], 2, 0, [0], GREEDY, adapter=adapter) for i in (2, 3)]
    adapters.add(requests[0])
    with Strict():
        adapters.add(requests[1])
    assert adapters.users.total() == 2
