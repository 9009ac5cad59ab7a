"""A profile of memory encodes the largest picture that a step may have."""

import pytest
import torch

from servd.checkpoint.model_spec import read_spec
from servd.worker.multimodal._tower import VisionTower
from servd.worker.worker import Worker
from tests.vision_models import FAMILIES
from tests.worker.driver import config_for
from tests.worker.recorded import RecordedRunner, use_recorded_runner


class Meter:
    """Counts what the tower returns; all else takes nothing."""

    total = 10**9
    num_bytes = 0

    def peak(self) -> int:
        return self.num_bytes

    def allocated(self) -> int:
        return 0

    used = held = allocated


@pytest.mark.parametrize("family", FAMILIES)
def test_the_profile_has_room_for_the_largest_picture(family, vision_checkpoint, monkeypatch):
    folder = vision_checkpoint(family)
    use_recorded_runner(monkeypatch)
    meter = Meter()
    monkeypatch.setattr(RecordedRunner, "meter", lambda self: meter)
    monkeypatch.setattr(RecordedRunner, "_graph_bytes", lambda self, meter: 0)
    outputs: list[torch.Tensor] = []
    encode = VisionTower.encode

    def spy(self, tensors):
        outputs.append(encode(self, tensors))
        meter.num_bytes = outputs[-1].nbytes
        return outputs[-1]

    monkeypatch.setattr(VisionTower, "encode", spy)
    config = config_for(folder, kv_cache_memory=None, max_model_len=512)
    worker = Worker(config, read_spec(folder), 0, lambda *_: None)
    worker.load_model()
    [output] = outputs
    assert 16 <= len(output) <= 512
    assert worker.runner.memory_use.forward == output.nbytes
