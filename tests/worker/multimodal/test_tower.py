"""A vision tower's outputs are those of transformers' whole model."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from servd.base.errors import ModelNotFound, UnsupportedModel
from servd.checkpoint.model_spec import read_spec
from servd.checkpoint.multimodal_config import text_name
from servd.worker.multimodal._tower import NativeLinear, VisionTower, attend
from servd.worker.ops import target
from tests.vision_models import FAMILIES
from tests.worker.multimodal.test_processors import picture, processor_of

CPU = torch.device("cpu")
SIZES = [(1, 1), (37, 121), (300, 450), (64, 64), (100, 1)]


def tensors_of(folder: Path, size: tuple[int, int]) -> tuple[dict[str, Tensor], int]:
    """Return a picture's tensors, and the number of its embeddings."""
    processed = processor_of(folder).process(picture(size), "auto")
    tensors = {name: torch.from_numpy(array) for name, array in processed.tensors.items()}
    return tensors, processed.num_embeds


def reference(folder: Path, tensors: dict[str, Tensor]) -> Tensor:
    """Return transformers' embeddings of a picture: [num_embeds, embed_size]."""
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32
    )
    with torch.no_grad():
        outputs = model.eval().get_image_features(**tensors, return_dict=True)
    features = [outputs.pooler_output, *getattr(outputs, "deepstack_features", [])]
    return torch.cat([torch.cat([*parts]).reshape(-1, 64) for parts in features], dim=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_the_whole_model(
    vision_checkpoint: Callable[[str], Path], family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = vision_checkpoint(family)
    spec = read_spec(folder)
    capfd.readouterr()
    tower = VisionTower.load(spec, torch.float32, CPU)
    for size in SIZES:
        tensors, num_embeds = tensors_of(folder, size)
        embeddings = tower.encode(tensors)
        assert capfd.readouterr() == ("", "")
        assert embeddings.shape == (num_embeds, spec.embed_size)
        assert not embeddings.requires_grad
        torch.testing.assert_close(embeddings, reference(folder, tensors), rtol=2e-4, atol=2e-4)
        capfd.readouterr()


@pytest.mark.skipif(not target.runs_native(CPU), reason="needs the CPU kernels")
@pytest.mark.parametrize(("x_dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 8e-3)])
def test_attention_is_that_of_float64(x_dtype: torch.dtype, tolerance: float) -> None:
    shapes = [(1, 2, 1, 16), (2, 3, 77, 72), (3, 2, 64, 80), (1, 1, 2304, 64), (1, 4, 5, 8)]
    shapes.append((60, 4, 600, 64))  # keys and values that are not packed at once
    for shape in shapes:
        q, k, v = (2 * torch.randn(shape, generator=torch.manual_seed(i)) for i in range(3))
        out, _ = attend(x_dtype, torch.nn.Identity(), q, k, v, None, 0.2)
        scores = q.double() @ k.double().mT * 0.2
        right = (scores.softmax(-1) @ v.double()).transpose(1, 2)
        assert (out - right).norm() < tolerance * right.norm(), shape


WITHOUT_MEMORY = """
import resource
import torch
from servd.ipc.child import limit_memory
from servd.worker.multimodal._tower import attend

q, k, v = torch.rand(3, 1, 2, 8000, 64)
attend(torch.float32, torch.nn.Identity(), q, k, v, None, 1.0)  # starts all threads
errors = []
for extra in range(8, 60):  # of half a MiB
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    try:
        limit_memory(extra << 19)
        attend(torch.float32, torch.nn.Identity(), q, k, v, None, 1.0)
    except (MemoryError, RuntimeError) as error:
        errors.append(type(error).__name__)
print(errors)
"""


@pytest.mark.skipif(not target.runs_native(CPU), reason="needs the CPU kernels")
def test_attention_without_memory_raises_and_the_process_lives() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "MemoryError" in run.stdout


def changed(
    folder: Path, change: Callable[[str, Tensor], tuple[str, Tensor] | None], to: Path
) -> Path:
    """Write the checkpoint to another folder, with changed tensors or without them."""
    for file in folder.glob("*.json*"):
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    pairs = [change(name, tensor) for name, tensor in tensors.items()]
    save_file(dict(pair for pair in pairs if pair), to / "model.safetensors")
    return to


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
def test_16_bit_weights(
    vision_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    is_native: bool,
) -> None:
    folder = vision_checkpoint(family)
    narrow = changed(folder, lambda name, tensor: (name, tensor.bfloat16()), tmp_path)
    if not is_native:
        monkeypatch.setattr(target, "runs_native", lambda device: False)
    tower = VisionTower.load(read_spec(narrow), torch.bfloat16, CPU)
    kinds = {type(module) for module in tower.model.modules()}
    assert (NativeLinear in kinds) == target.runs_native(CPU)
    tensors, _ = tensors_of(narrow, (300, 450))
    embeddings = tower.encode(tensors)
    assert embeddings.dtype == (torch.float32 if NativeLinear in kinds else torch.bfloat16)
    right = reference(narrow, tensors)
    error = (embeddings.float() - right).norm() / right.norm()
    assert error < 0.03
    assert 0 < tower.nbytes < (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_older_names_of_tensors(
    vision_checkpoint: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    folder = vision_checkpoint(family)

    def rename(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        name = name.removeprefix("model.")
        if family == "qwen2_5_vl":
            return name.replace("language_model.", "model."), tensor
        return name.replace("language_model.", "language_model.model."), tensor

    older = changed(folder, rename, tmp_path)
    path = older / "config.json"
    config = json.loads(path.read_text(encoding="utf8"))
    if family == "qwen2_5_vl":
        config = config.pop("text_config") | config
    # Of a language model that is quantized.
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    path.write_text(json.dumps(config), encoding="utf8")
    tensors, _ = tensors_of(folder, (37, 121))
    towers = [VisionTower.load(read_spec(path), torch.float32, CPU) for path in (folder, older)]
    new, old = (tower.encode(tensors) for tower in towers)
    torch.testing.assert_close(old, new, rtol=0, atol=0)


def test_missing_quantized_and_misshapen_weights_are_named(
    vision_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = vision_checkpoint("smolvlm")
    name = next(name for name in load_file(folder / "model.safetensors") if "connector" in name)
    cases = [
        (None, ModelNotFound, "lacks 1 weights"),
        (torch.zeros(64, 64, dtype=torch.int8), UnsupportedModel, "is quantized"),
        (torch.zeros(3, 5), UnsupportedModel, "cannot be loaded"),
    ]
    for number, (other, error, words) in enumerate(cases):
        to = tmp_path / str(number)
        to.mkdir()

        def change(key: str, tensor: Tensor, other: Tensor | None = other) -> Any:
            if key != name:
                return key, tensor
            return None if other is None else (key, other)

        changed(folder, change, to)
        with pytest.raises(error, match=words):
            VisionTower.load(read_spec(to), torch.float32, CPU)


def test_a_checkpoint_without_its_tower(
    vision_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    def change(name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        return None if text_name(name) is None else (name, tensor)

    folder = changed(vision_checkpoint("gemma3"), change, tmp_path)
    with pytest.raises(ModelNotFound, match="weights of its vision tower"):
        VisionTower.load(read_spec(folder), torch.float32, CPU)
