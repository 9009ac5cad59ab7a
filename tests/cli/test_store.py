"""servd run, list, rm and short names, over a Hugging Face cache that is made here."""

import argparse
import contextlib
import io
import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers

from servd import cli
from servd.base.errors import ConfigError, ModelNotFound, NotEnoughMemory, ServdError
from servd.base.sizes import MemoryPlan
from servd.checkpoint.facts import Facts, read_facts
from servd.checkpoint.short_names import full_name
from servd.cli import list as list_command
from servd.cli import plan, rm, run
from servd.config import Config
from servd.terminal import api_client

TINY = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 64}
TINY |= {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 9}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(TINY))
    (snapshot / "model.safetensors").write_bytes(bytes(2048))
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("abc")
    for command in (list_command, rm):
        monkeypatch.setattr(command, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def execute(*argv: str) -> int:
    arguments = cli.make_parser().parse_args(argv)
    return arguments.run(arguments)


def test_models_of_the_cache_are_listed_and_removed(cache: Path, capsys):
    assert execute("list") == 0
    assert capsys.readouterr().out.split() == ["org/tiny", "2KiB", "64", "tokens"]
    with pytest.raises(ModelNotFound, match=r"no model '\.\./tiny'"):
        execute("rm", "../tiny")
    assert execute("rm", "org/tiny") == 0
    assert not (cache / "models--org--tiny").exists()
    execute("list")
    assert "servd pull" in capsys.readouterr().out


BAD = "bad\x1b[2J\nname"
SHOWN = {"details": {"family": BAD, "parameter_size": "1B", "quantization_level": "F16"}}
SHOWN |= {"model_info": {f"{BAD}.context_length": 64}, "template": "", "capabilities": [BAD]}
LOADED = {"models": [{"name": BAD, "size": 1, "context_length": 64}]}
SERVER = ("--url", "http://a-server")


@pytest.mark.parametrize(
    "argv",
    [
        ("list", "CACHE"),
        ("list", f"CACHE/{BAD}"),
        ("show", f"org/{BAD}"),
        ("show", "m", *SERVER),
        ("check", f"CACHE/{BAD}"),
        ("ps", *SERVER),
        ("pull", f"CACHE/{BAD}"),
        ("rm", BAD),
    ],
    ids=lambda argv: ascii(" ".join(argv)),
)
def test_names_do_not_control_the_terminal(cache: Path, capsys, monkeypatch, argv):
    (cache / "models--org--tiny").rename(cache / f"models--org--{BAD}")
    (cache / BAD).mkdir()
    if argv[0] == "pull":
        (cache / BAD / "config.json").write_text(json.dumps(TINY))
    reply = io.BytesIO(json.dumps(SHOWN).encode())
    monkeypatch.setattr(api_client.Client, "open", lambda *_: contextlib.nullcontext(reply))
    monkeypatch.setattr(api_client.Client, "get", lambda *_: LOADED)
    logger = logging.getLogger("servd")
    monkeypatch.setattr(logger, "level", logger.level)  # `check` silences it
    with pytest.raises(SystemExit):
        cli.main([word.replace("CACHE", str(cache)) for word in argv])
    written = capsys.readouterr()
    assert r"bad\x1b[2J" in written.out + written.err
    assert "\x1b" not in written.out + written.err
    assert "\nname" not in written.out  # an error may have several lines


def test_a_model_of_the_cache_is_shown(cache: Path, capsys, monkeypatch):
    folder = cache / "models--org--tiny" / "snapshots" / "abc"
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    packed = {"dtype": "I32", "shape": [4, 8], "data_offsets": [0, 128]}
    scales = {"dtype": "F16", "shape": [4], "data_offsets": [128, 136]}
    header = json.dumps({"a.qweight": packed, "a.scales": scales}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(136)
    (folder / "model.safetensors").write_bytes(content)
    quantized = TINY | {"quantization_config": {"quant_method": "gptq", "bits": 8}}
    (folder / "config.json").write_text(json.dumps(quantized))
    assert execute("show", "org/tiny") == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed["architecture"] == "gpt2" and printed["license"] == "mit"
    assert printed["context"] == "64 tokens" and printed["weights"].startswith("gptq, ")
    assert read_facts(str(folder)) == Facts(len(content), 4 * 8 * 4, "gptq", "mit")
    damaged = (b"[1,2]", b'{"a": "x"}', b'{"a": {"dtype": "F32"}}', b"\xff", b"")
    for header in damaged:  # no number, and no other error
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        assert read_facts(str(folder)).num_parameters == 0
    with (folder / "model.safetensors").open("wb") as file:
        file.write(b"\xff" * 8)
        file.truncate(1 << 30)
    tracemalloc.start()
    assert read_facts(str(folder)).num_parameters == 0
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    with pytest.raises(ServdError, match="no server answers at http://127.0.0.1:1"):
        execute("show", "org/tiny", "--url", "http://127.0.0.1:1")
    monkeypatch.setattr(api_client, "DEFAULT_URL", "http://127.0.0.1:1")
    with pytest.raises(ModelNotFound, match="servd pull"):
        execute("show", "org/other")


def test_a_short_name_is_a_model_also_in_the_user_s_own_table(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert Config.load({"model": "qwen3:0.6b"}).model.model == "Qwen/Qwen3-0.6B"
    assert full_name("./folder:Q4") == "./folder:Q4"
    table = tmp_path / "servd" / "models.toml"
    table.parent.mkdir()
    table.write_text('mine = "./folder"\n"qwen3:0.6b" = "other/model"\n')
    assert (full_name("mine"), full_name("qwen3:0.6b")) == ("./folder", "other/model")
    table.write_text("mine = ")
    with pytest.raises(ConfigError, match="models.toml"):
        full_name("mine")


@pytest.mark.parametrize("error", [PermissionError, NotADirectoryError, IsADirectoryError, OSError])
def test_a_table_of_names_without_access_counts_as_none(monkeypatch, tmp_path: Path, error):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    read_text = Path.read_text

    def read(path: Path, *args: Any, **options: Any) -> str:
        if path.is_relative_to(tmp_path):
            raise error("no access")
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read)
    assert full_name("qwen3:0.6b") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("home", ["/dev/null", "/proc/self/mem/x", "/nowhere", ""])
def test_no_home_is_no_reason_not_to_start(monkeypatch, home):
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    assert full_name("qwen3:0.6b") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(("fits", "chosen"), [((None,), None), (("int8",), "int8"), ((), "")])
def test_the_first_quantization_that_fits_is_taken(monkeypatch, fits, chosen):
    def make_report(config: Config) -> plan.PlanReport:
        report = plan_of(config)
        if config.model.quantization not in fits:
            report.plan = msgspec.structs.replace(report.plan, num_blocks=0)
        return report

    plan_of = plan.make_report
    monkeypatch.setattr(plan, "make_report", make_report)
    options = {"model": "demo", "device": "cpu"}
    if not fits:
        with pytest.raises(NotEnoughMemory, match="demo takes .* as int4"):
            run.choose(options)
        return
    path, line = run.choose(options)
    assert path.get("quantization") == chosen
    assert line.startswith("demo: ") and "2048 tokens of context" in line
    assert isinstance(plan_of(Config.load(path)).plan, MemoryPlan)


def test_a_quantized_model_that_does_not_fit_is_named_with_numbers(monkeypatch):
    def make_report(config: Config) -> plan.PlanReport:
        assert config.model.quantization is None, "its weights are quantized already"
        report = plan_of(config)
        report.quantization = "gptq"
        report.plan = msgspec.structs.replace(report.plan, num_blocks=0, free=1 << 20)
        report.for_caches = -(2 << 30)
        return report

    plan_of = plan.make_report
    monkeypatch.setattr(plan, "make_report", make_report)
    with pytest.raises(NotEnoughMemory) as error:
        run.choose({"model": "demo", "device": "cpu"})
    message = str(error.value)
    assert message.startswith("demo takes") and "gptq" in message and "1MiB" in message
    assert "2GiB more memory" in message and "--quantization" not in message


def test_rm_deletes_nothing_outside_of_the_cache(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(rm, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--a--gg"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    other = tmp_path / "other" / "blobs"
    other.mkdir(parents=True)
    (other / "mine.gguf").write_text("precious")
    (snapshot / "m-Q8_0.gguf").symlink_to(other / "mine.gguf")
    cli_arguments = argparse.Namespace(model="a/gg:Q8_0")
    assert rm.run(cli_arguments) == 0
    assert (other / "mine.gguf").read_text() == "precious"
    assert not (snapshot / "m-Q8_0.gguf").is_symlink()
    (tmp_path / "hub" / "models--a--link").symlink_to(tmp_path / "other")
    with pytest.raises(ServdError, match="is a link"):
        rm.run(argparse.Namespace(model="a/link"))
    assert (other / "mine.gguf").exists()
