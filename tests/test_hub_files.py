"""MODEL "org/name:Q4_K_M": which files of the hub are downloaded, and what needs no network."""

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any

import pytest

from servd import cli
from servd.base.errors import ModelNotFound, ServdError
from servd.checkpoint import gguf, hub, model_spec, weight_files
from servd.checkpoint.gguf import choose_files, find_quantization
from servd.cli import list as list_command
from servd.cli import main, plan, rm
from servd.config import Config
from servd.gateway.models import ModelFolder
from servd.worker.ops import native
from tests import fake_hub, gguf_files


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
    vocabulary = gguf_files.bpe_vocabulary(tiny_llama / "tokenizer.json")
    f16 = gguf_files.Quant.F16
    gguf_files.write_model(folder / "m-F16.gguf", model, f16, vocabulary=vocabulary, split=8)
    (folder / "mmproj-F16.gguf").write_bytes(b"not read")
    (folder / "README.md").write_text("a model")
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_symlink())


def test_the_file_of_a_quantization_is_downloaded_alone(files: Path, tmp_path: Path, monkeypatch):
    cache = tmp_path / "hub"
    shutil.copy(files / "m-Q8_0.gguf", files / "x[1]-Q4_1.gguf")
    with fake_hub.online(files, monkeypatch):
        blobs = hub.blobs_to_download("org/name:q8_0")
        folder = hub.find_model("org/name:q8_0", download_dir=str(cache))
        assert names_in(cache) == ["m-Q8_0.gguf"]
        assert blobs == {f.name: f.stat().st_size for f in cache.glob("models--*/blobs/*")}
        assert model_spec.read_spec(folder).num_layers == 2
        assert hub.download_weights("org/name:Q8_0", download_dir=str(cache)) == folder
        assert hub.find_headers("org/name:Q8_0", None, str(cache), str(tmp_path)) == folder
        split = hub.find_model("org/name:F16", download_dir=str(cache))
        parts = len(weight_files.find_weight_files(split))
        assert parts > 1 and len(names_in(cache)) == 1 + parts
        hub.find_model("org/name:Q4_1", download_dir=str(cache))
        assert "x[1]-Q4_1.gguf" in names_in(cache)
        with pytest.raises(ModelNotFound, match=r"org/name:Q4_0 matches 0 files.*has m-BF16\.gguf"):
            hub.find_model("org/name:Q4_0", download_dir=str(cache))
        with pytest.raises(ModelNotFound, match=r"org/name:16 matches 2 files"):
            hub.find_model("org/name:16", download_dir=str(cache))
        with pytest.raises(ModelNotFound, match="the hub has no model 'org/other:Q8_0'"):
            hub.find_model("org/other:Q8_0", download_dir=str(cache))
    for offline in (False, True):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        assert hub.find_model("org/name:Q8_0", download_dir=str(cache)) == folder
        assert hub.find_model("org/name:F16", download_dir=str(cache)) == split
        with pytest.raises(ModelNotFound, match="org/name:BF16 matches 0 files"):
            hub.find_model("org/name:BF16", download_dir=str(cache))
    Path(weight_files.find_weight_files(split)[1]).readlink().unlink()
    with pytest.raises(ModelNotFound, match=r"lacks 1 of . weight files: m-F16-00002-of-"):
        hub.find_model("org/name:F16", download_dir=str(cache))


@pytest.mark.parametrize("step", [gguf.HEADER_STEP, 1000])
def test_a_plan_reads_only_the_headers_of_files(files: Path, tmp_path: Path, monkeypatch, step):
    monkeypatch.setattr(gguf, "HEADER_STEP", step)
    cache = str(tmp_path / "hub")
    whole = files / "m-Q8_0.gguf"
    with whole.open("ab") as file:
        file.truncate(20 << 20)

    def facts_of(model: str) -> dict[str, Any]:
        options = {"model": model, "download_dir": cache, "kv_cache_memory": 1 << 20}
        facts = plan.make_report(Config.load(options)).facts([16])
        assert facts.pop("model") == model
        assert facts.pop("free") > 0
        return facts

    reader, _ = gguf.open_file(whole)
    with fake_hub.online(files, monkeypatch) as gate:
        facts = facts_of("org/name:Q8_0")
        assert gate.num_bytes <= max(2 * reader.data_offset, step)
        assert facts == facts_of(str(whole))
        assert facts_of("org/name:F16") == facts_of(str(files / "m-F16-00001-of-00003.gguf"))
        assert not names_in(tmp_path / "hub")
        hub.find_model("org/name:Q8_0", download_dir=cache)
        gate.num_bytes = 0
        assert facts_of("org/name:Q8_0") == facts
        assert not gate.num_bytes, "the file is in the cache"


def test_a_plan_names_the_quantization_of_the_weights(files: Path):
    def last_column(**options: Any) -> str:
        report = plan.make_report(Config.load({"kv_cache_memory": 1 << 20, **options}))
        return next(row.split()[-1] for row in report.text([16]).splitlines() if "weights" in row)

    assert last_column(model=str(files / "m-Q8_0.gguf")) == "gguf"  # it states no type
    kept = "float32" if native.library() is None else "bfloat16"  # kernels read 16 bits
    assert last_column(model="demo", device="cpu") == kept
    assert last_column(model="demo", quantization="int8") == "int8"


@pytest.mark.parametrize("kind", ["llama3", "longrope"])
def test_factors_of_long_contexts_are_read_from_the_hub(
    files: Path, tiny_llama: Path, tmp_path: Path, monkeypatch, kind
):
    from transformers import LlamaConfig, LlamaForCausalLM

    ropes = {
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": {
            "short_factor": [1.0, 1.1, 1.3, 1.6, 1.7, 1.8, 1.9, 2.1],
            "long_factor": [1.5, 2.0, 3.0, 6.0, 7.0, 8.0, 8.5, 9.0],
        },
    }
    rope = {"rope_type": kind, "rope_theta": 500.0, "original_max_position_embeddings": 32}
    config = LlamaConfig.from_pretrained(tiny_llama, rope_parameters=rope | ropes[kind])
    path = files / "long-Q4_0.gguf"
    gguf_files.write_model(path, LlamaForCausalLM(config), gguf_files.Quant.F16)
    monkeypatch.setattr(gguf, "HEADER_STEP", 1000)
    with fake_hub.online(files, monkeypatch) as gate:
        headers = hub.find_gguf_headers("org/name:Q4_0", None, str(tmp_path / "h"), str(tmp_path))
    assert gate.num_bytes < path.stat().st_size // 2
    assert model_spec.read_spec(headers).config == model_spec.read_spec(gguf.as_folder(path)).config


@pytest.mark.parametrize("data", [bytes(1 << 20), b"GGUF"], ids=["zeros", "too short"])
def test_a_header_that_cannot_be_read_ends(tmp_path: Path, monkeypatch, data: bytes):
    monkeypatch.setattr(gguf, "HEADER_STEP", 1 << 10)
    monkeypatch.setattr(gguf, "MAX_HEADER", 1 << 16)
    opened: list[Path] = []
    open_file = gguf.open_file

    def note(path: Path, **options: Any) -> Any:
        opened.append(path)
        return open_file(path, **options)

    monkeypatch.setattr(gguf, "open_file", note)
    source = io.BytesIO(data)
    with pytest.raises(ModelNotFound, match=r"a\.gguf cannot be read as GGUF"):
        gguf.copy_header(source, 1 << 20, tmp_path / "a.gguf")
    assert source.tell() <= 1 << 16 and len(opened) <= 7, "its bytes are parsed about twice"


def test_a_folder_has_a_model_per_quantization(files: Path, tmp_path: Path):
    shutil.copy(files / "m-Q8_0.gguf", files / "odd-1-of-0.gguf")
    models = ModelFolder(files).read()
    assert sorted(models) == ["m-BF16", "m-F16", "m-Q8_0", "odd"]
    assert models["m-F16"].facts.num_bytes == sum(f.stat().st_size for f in files.glob("m-F16-*"))
    (tmp_path / "odd-1-of-0.safetensors").write_bytes(b"")
    assert weight_files.find_weight_files(tmp_path) == [tmp_path / "odd-1-of-0.safetensors"]


def test_files_of_the_cache_have_names_of_their_own(files: Path, tmp_path: Path):
    repository = tmp_path / "hub" / "models--org--name"
    for revision, name in (
        ("new", "m-Q8_0"),
        ("old", "m-Q8_0"),
        ("old", "m-Q4_0"),
        ("new", "m-1B-F16"),
        ("new", "m-3B-F16"),
        ("new", "mmproj-F16"),
    ):
        (repository / "snapshots" / revision).mkdir(parents=True, exist_ok=True)
        shutil.copy(files / "m-Q8_0.gguf", repository / "snapshots" / revision / f"{name}.gguf")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("new")
    models = ModelFolder(tmp_path / "hub").read()
    tags = {
        name.removeprefix("org/name:"): model.path.parent.name for name, model in models.items()
    }
    assert tags == {"Q8_0": "new", "Q4_0": "old", "m-1B-F16": "new", "m-3B-F16": "new"}


def test_a_name_of_the_list_can_be_shown_and_removed(files: Path, tmp_path, monkeypatch, capsys):
    def execute(*argv: str) -> list[str]:
        arguments = cli.make_parser().parse_args(argv)
        assert arguments.run(arguments) == 0
        return capsys.readouterr().out.split()

    cache = tmp_path / "hub"
    for command in (list_command, rm):
        monkeypatch.setattr(command, "HF_HUB_CACHE", str(cache))
    with fake_hub.online(files, monkeypatch):
        for tag in ("Q8_0", "F16"):
            hub.download_weights(f"org/name:{tag}", download_dir=str(cache))
    assert {"org/name:F16", "org/name:Q8_0"} <= {*execute("list")}
    assert "llama" in execute("show", "org/name:F16")
    with pytest.raises(ModelNotFound, match="no model 'org/name:F1'"):
        execute("rm", "org/name:F1")
    execute("rm", "org/name:F16")
    assert names_in(cache) == ["m-Q8_0.gguf"]
    assert len([*cache.glob("models--*/blobs/*")]) == 1
    execute("rm", "org/name")
    assert not [*cache.glob("models--*")]


@pytest.mark.parametrize("linked", ["models--org--name", "models--org--name/snapshots/main"])
@pytest.mark.parametrize("name", ["org/name", "org/name:Q8_0"])
def test_what_a_link_leads_to_is_not_removed(files: Path, tmp_path, monkeypatch, linked, name):
    cache, elsewhere = tmp_path / "hub", tmp_path / "elsewhere"
    monkeypatch.setattr(rm, "HF_HUB_CACHE", str(cache))
    (cache / linked).parent.mkdir(parents=True)
    (cache / linked).symlink_to(elsewhere)
    kept = elsewhere if linked.endswith("main") else elsewhere / "snapshots" / "main"
    kept.mkdir(parents=True)
    (elsewhere / "blobs").mkdir()
    shutil.copy(files / "m-Q8_0.gguf", elsewhere / "blobs" / "abc")
    (kept / "m-Q8_0.gguf").symlink_to(elsewhere / "blobs" / "abc")
    arguments = cli.make_parser().parse_args(["rm", name])
    with contextlib.suppress(ServdError):
        arguments.run(arguments)
    assert (kept / "m-Q8_0.gguf").exists()


def test_pull_prints_the_folder(files: Path, tmp_path: Path, monkeypatch, capsys):
    with fake_hub.online(files, monkeypatch), pytest.raises(SystemExit) as ended:
        main(["pull", "org/name:Q8_0", "--cache", str(tmp_path)])
    assert ended.value.code == 0
    assert model_spec.read_spec(capsys.readouterr().out.strip()).num_layers == 2


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
