"""MODEL "org/name:Q4_K_M": which files of the hub are downloaded, and what needs no network."""

from pathlib import Path

import pytest

gguf_files = pytest.importorskip("tests.gguf_files")

from servd.base.errors import ModelNotFound  # noqa: E402
from servd.checkpoint import hf  # noqa: E402
from servd.checkpoint.gguf import choose_files, find_quantization  # noqa: E402
from servd.cli import main  # noqa: E402
from servd.gateway.models import ModelFolder  # noqa: E402
from tests import fake_hub  # noqa: E402


@pytest.fixture
def files(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the hub's model org/name."""
    from transformers import LlamaForCausalLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "files"
    folder.mkdir()
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    gguf_files.write_model(folder / "m-Q8_0.gguf", model, gguf_files.Quant.Q8_0)
    gguf_files.write_model(folder / "m-BF16.gguf", model, gguf_files.Quant.BF16)
    gguf_files.write_model(folder / "m-F16.gguf", model, gguf_files.Quant.F16, split=8)
    (folder / "mmproj-F16.gguf").write_bytes(b"not read")
    (folder / "README.md").write_text("a model")
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_symlink())


def test_the_file_of_a_quantization_is_downloaded_alone(files: Path, tmp_path: Path, monkeypatch):
    cache = tmp_path / "hub"
    with fake_hub.online(files, monkeypatch):
        assert hf.download_size("org/name:q8_0") == (files / "m-Q8_0.gguf").stat().st_size
        folder = hf.find_model("org/name:q8_0", download_dir=str(cache))
        assert names_in(cache) == ["m-Q8_0.gguf"]
        assert hf.read_spec(folder).num_layers == 2
        assert hf.download_weights("org/name:Q8_0", download_dir=str(cache)) == folder
        assert hf.find_headers("org/name:Q8_0", None, str(cache), str(tmp_path)) == folder
        split = hf.find_model("org/name:F16", download_dir=str(cache))
        parts = len(hf.weight_files(split))
        assert parts > 1 and len(names_in(cache)) == 1 + parts
        with pytest.raises(ModelNotFound, match=r"org/name:Q4_0 matches 0 files.*has m-BF16\.gguf"):
            hf.find_model("org/name:Q4_0", download_dir=str(cache))
        with pytest.raises(ModelNotFound, match=r"org/name:16 matches 2 files"):
            hf.find_model("org/name:16", download_dir=str(cache))
        with pytest.raises(ModelNotFound, match="the hub has no model 'org/other:Q8_0'"):
            hf.find_model("org/other:Q8_0", download_dir=str(cache))
    for offline in (False, True):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        assert hf.find_model("org/name:Q8_0", download_dir=str(cache)) == folder
        assert hf.find_model("org/name:F16", download_dir=str(cache)) == split
        with pytest.raises(ModelNotFound, match="org/name:BF16 matches 0 files"):
            hf.find_model("org/name:BF16", download_dir=str(cache))
    Path(hf.weight_files(split)[1]).readlink().unlink()
    with pytest.raises(ModelNotFound, match=r"lacks 1 of . weight files: m-F16-00002-of-"):
        hf.find_model("org/name:F16", download_dir=str(cache))


def test_a_folder_has_a_model_per_quantization(files: Path, tmp_path: Path, monkeypatch):
    models = ModelFolder(files).read()
    assert sorted(models) == ["m-BF16", "m-F16", "m-Q8_0"]
    assert models["m-F16"].num_bytes == sum(f.stat().st_size for f in files.glob("m-F16-*"))
    with fake_hub.online(files, monkeypatch):
        hf.download_weights("org/name:Q8_0", download_dir=str(tmp_path / "hub"))
    assert [*ModelFolder(tmp_path / "hub").read()] == ["org/name:Q8_0"]


def test_pull_prints_the_folder(files: Path, tmp_path: Path, monkeypatch, capsys):
    with fake_hub.online(files, monkeypatch), pytest.raises(SystemExit) as ended:
        main(["pull", "org/name:Q8_0", "--cache", str(tmp_path)])
    assert ended.value.code == 0
    assert hf.read_spec(capsys.readouterr().out.strip()).num_layers == 2


@pytest.mark.parametrize(
    ("tag", "chosen"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q4_k_s", ["m-Q4_K_S.gguf"]),
        ("F16", ["m-F16.gguf"]),
        ("BF16", [f"BF16/m-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]),
        ("00001", [f"BF16/m-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]),
        ("UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
    ],
)
def test_a_whole_word_is_preferred(tag: str, chosen: list[str]):
    names = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-F16.gguf", "m-UD-Q4_K_XL.gguf"]
    names += ["mmproj-F16.gguf", "README.md", "config.json"]
    names += [f"BF16/m-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert choose_files("org/name", names, tag, "it") == chosen
    assert find_quantization(chosen[0]) in (tag.upper(), "BF16")


def test_a_name_that_fits_several_files_lists_them():
    with pytest.raises(ModelNotFound, match=r"2 files, .*it has m-Q4_K_M\.gguf, m-Q4_K_S\.gguf$"):
        choose_files("org/name", ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "x.gguf"], "Q4_K", "it")
