"""From a checkpoint to the weights of a model."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from servd.base.errors import ModelNotFound, NotEnoughMemory, UnsupportedModel
from servd.checkpoint import model_spec
from servd.worker.device.parallel import Parallel
from servd.worker.layers import embedding
from servd.worker.layers._matrix import MakeQuantMethod, QuantMethod
from servd.worker.loading import model_loader
from servd.worker.quantization._files import read_tensors
from servd.worker.runner import dry_run
from servd.worker.worker import Worker
from tests.worker.driver import config_for


def mapped(path: Path) -> list[range]:
    """Addresses at which the file lies in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    lines = [line.split() for line in lines if str(path) in line]
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]


def test_whole_matrices_are_packed_from_the_mapped_file(tiny_gpt2: Path):
    cpu = torch.device("cpu")
    parallel = Parallel.connect(0, 1, cpu, None)
    model = model_loader.build_model(model_spec.read_spec(tiny_gpt2), torch.float32, cpu, parallel)
    pack = model_loader.quant_method_maker(torch.float32, None, str(tiny_gpt2)).dense
    file = tiny_gpt2 / "model.safetensors"
    num_mapped = 0

    def make(weight: torch.Tensor) -> QuantMethod | None:
        nonlocal num_mapped
        num_mapped += any(weight.data_ptr() in page for page in mapped(file))
        form = pack(weight)
        assert form is not None
        assert torch.equal(form.multiply(torch.eye(weight.shape[1]), None), weight.t())
        return form

    model_loader.load_weights(model, str(tiny_gpt2), lambda fraction: None, MakeQuantMethod(make))
    whole = [name for name, _ in model.named_parameters() if name.endswith("c_proj.weight")]
    assert 0 < len(whole) <= num_mapped


@pytest.mark.parametrize("method", ["tests.worker.driver:Driver", "int8", "new"])
def test_a_checkpoint_names_no_code_outside_of_servd(method: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(
        f'{{"quantization_config": {{"quant_method": "{method}"}}}}'
    )
    with pytest.raises(UnsupportedModel, match=f"quant_method '{method}' are not supported"):
        model_loader._checkpoint([tmp_path / "model.safetensors"], torch.empty(1))


def test_pickled_weights_are_those_of_safetensors(tmp_path: Path, tiny_gpt2: Path):
    shutil.copytree(tiny_gpt2, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    logits = []
    for folder, load_format in ((tiny_gpt2, "auto"), (tmp_path, "pt")):
        config = config_for(folder, load_format=load_format)
        spec = model_spec.read_spec(folder)
        planned = dry_run.plan(config, spec).sizes
        worker = Worker(config, spec, 0, lambda *_: None)
        worker.load_model()
        assert worker.runner.weights_bytes == planned.weights
        logits.append(worker.runner.model.compute_logits(torch.eye(spec.hidden_size)))
    assert torch.equal(*logits)
    torch.save({"a": Path()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"pytorch_model\.bin cannot be read"):
        worker.load_model()


def test_all_broken_files_are_named(tmp_path: Path, tiny_gpt2: Path):
    shutil.copytree(tiny_gpt2, tmp_path, dirs_exist_ok=True)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    for name, size in (("model-2", len(whole) - 1), ("model-3", 0)):
        (tmp_path / f"{name}.safetensors").write_bytes(whole[:size])
    with pytest.raises(ModelNotFound, match=r"2 of 3 .*model-2\.saf.*, model-3\.saf.*again"):
        Worker(
            config_for(tmp_path), model_spec.read_spec(tmp_path), 0, lambda *_: None
        ).load_model()


def archive_of(path: Path, tensors: dict[str, Any], **options: int) -> None:
    """Save tensors and write the archive again, with such options of zipfile."""
    torch.save(tensors, path)
    with zipfile.ZipFile(path) as before:
        entries = {name: before.read(name) for name in before.namelist()}
    with zipfile.ZipFile(path, "w", **options) as again:
        for name, data in entries.items():
            again.writestr(name, data)


def bomb(path: Path) -> None:
    """A pickle that is small in the file and not in memory."""
    torch.save({"a": torch.ones(1)}, path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 28))


MADE_UP: dict[str, Callable[[Path], Any]] = {
    "compressed": lambda path: archive_of(
        path, {"a": torch.zeros(10_000)}, compression=zipfile.ZIP_DEFLATED
    ),
    "bomb": bomb,
    "sparse": lambda path: torch.save({"a": torch.eye(4).to_sparse()}, path),
    "complex": lambda path: torch.save({"a": torch.ones(4, dtype=torch.complex64)}, path),
    "quantized": lambda path: torch.save(
        {"a": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}, path
    ),
    "without numbers": lambda path: torch.save({"a": torch.ones(4, device="meta")}, path),
    "no names": lambda path: torch.save({1: torch.ones(4)}, path),
    "nested": lambda path: torch.save({"a": {"b": torch.ones(4)}}, path),
    "of long ago": lambda path: torch.save(
        {"a": torch.ones(4)}, path, _use_new_zipfile_serialization=False
    ),
    "a name that is no text": lambda path: path.write_bytes(
        path.read_bytes().replace(b"data.pkl", b"d\xfda.pkl")
    ),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-100]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MADE_UP)
def test_made_up_pickles_are_refused(kind, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(1000)}, path)
    assert dict(read_tensors([path]))["a"].sum() == 1000
    MADE_UP[kind](path)
    with pytest.raises(ModelNotFound, match=r"pytorch_model\.bin cannot be read"):
        list(read_tensors([path]))


def test_a_file_larger_than_memory_is_refused_by_name(tiny_gpt2, monkeypatch):
    """Where memory may not be overcommitted, torch cannot map such a file."""

    def cannot_map(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 60000000000 bytes: Cannot allocate memory (12)")

    monkeypatch.setattr("servd.worker.quantization._files.safe_open", cannot_map)
    with pytest.raises(NotEnoughMemory, match=r"model\.safetensors cannot be mapped: unable"):
        Worker(
            config_for(tiny_gpt2), model_spec.read_spec(tiny_gpt2), 0, lambda *_: None
        ).load_model()


@pytest.mark.parametrize(
    "stated",
    [((2**40,), (1,), 0), ((4, 2**40), (0, 1), 0), ((4,), (1,), 2**40), ((4,), (-1,), 4)],
    ids=["size", "stride", "offset", "negative"],
)
def test_a_pickled_tensor_reaches_no_memory_but_its_own(stated, tmp_path):
    size, stride, offset = stated

    class Lie:
        def __reduce__(self) -> Any:
            storage = torch.ones(8).untyped_storage()
            typed = torch.storage.TypedStorage(
                wrap_storage=storage, dtype=torch.float32, _internal=True
            )
            return torch._utils._rebuild_tensor_v2, (typed, offset, size, stride, False, {})

    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": Lie()}, path)
    with pytest.raises(ModelNotFound, match=r"pytorch_model\.bin cannot be read"):
        list(read_tensors([path]))


def test_an_output_head_of_an_odd_size_is_padded_on_cuda(monkeypatch: pytest.MonkeyPatch):
    sizes = [(50257, 50304), (128256, 128256), (1, 64)]
    for device, column in (("cpu", 0), ("cuda", 1)):
        for size in sizes:
            assert embedding.padded_rows(size[0], torch.device(device)) == size[column]
    monkeypatch.setattr(embedding, "padded_rows", lambda size, device: 64)
    head, weight, hidden = embedding.VocabEmbedding(50, 8, Parallel()), *torch.randn(2, 50, 8)
    head.weight.load(weight)
    assert head.weight.shape == (64, 8) and not head.weight.missing
    torch.testing.assert_close(head.logits(hidden), hidden @ weight.T)
    ids = torch.tensor([49, 0, 7])
    assert torch.equal(head(ids), weight[ids])
