"""From a checkpoint to the weights of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from servd import hf
from servd.errors import UnsupportedModel
from servd.worker import model_loader
from servd.worker.layers._matrix import Form
from servd.worker.parallel import Parallel


def mapped(path: Path) -> list[range]:
    """Addresses at which the file lies in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    lines = [line.split() for line in lines if str(path) in line]
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]


def test_whole_matrices_are_packed_from_the_mapped_file(tiny_gpt2: Path):
    cpu = torch.device("cpu")
    parallel = Parallel.connect(0, 1, cpu, None)
    model = model_loader.build_model(hf.read_spec(tiny_gpt2), torch.float32, cpu, parallel)
    pack = model_loader.form_maker(torch.float32, None, str(tiny_gpt2))
    file, num_mapped = tiny_gpt2 / "model.safetensors", 0

    def make(weight: torch.Tensor) -> Form | None:
        nonlocal num_mapped
        num_mapped += any(weight.data_ptr() in page for page in mapped(file))
        form = pack(weight)
        assert form is not None
        assert torch.equal(form.multiply(torch.eye(weight.shape[1]), None), weight.t())
        return form

    model_loader.load_weights(model, str(tiny_gpt2), lambda fraction: None, make)
    whole = [name for name, _ in model.named_parameters() if name.endswith("c_proj.weight")]
    assert 0 < len(whole) <= num_mapped


@pytest.mark.parametrize("method", ["tests.worker.driver:Driver", "int8", "new"])
def test_a_checkpoint_names_no_code_outside_of_servd(method: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(
        f'{{"quantization_config": {{"quant_method": "{method}"}}}}'
    )
    with pytest.raises(UnsupportedModel, match=f"quant_method '{method}' are not supported"):
        model_loader._checkpoint([tmp_path / "model.safetensors"], torch.empty(1))
