"""A CUDA device on a CPU: the kernels that a GPU runs, in Triton's interpreter, and steps as graphs
that refuse what a CUDA graph cannot capture.
"""

import pytest

from servd.worker.ops import native, target
from servd.worker.quantization import int4
from servd.worker.runner.gpu_model_runner import GPUModelRunner
from tests.worker import recorded


class SimulatedRunner(recorded.RecordedRunner):
    """Takes the place of a CPUModelRunner, with the attention of a GPU."""

    def load_model(self, progress):
        GPUModelRunner.load_model(self, progress)
        for matrix in self.adapters.matrices if self.adapters else ():
            recorded.ON_HOST[id(matrix.factors.part_ends)] = matrix.factors.part_ends


def use_simulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers on a CPU take it for a CUDA device."""
    monkeypatch.setattr(target, "runs_triton", lambda device: True)
    monkeypatch.setattr("servd.worker.worker.CPUModelRunner", SimulatedRunner)
    monkeypatch.setattr(int4, "round_groups", recorded.with_kernels(int4.round_groups))
    monkeypatch.setattr(native, "library", lambda: None)
