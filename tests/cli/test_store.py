"""servd run, list, rm and short names, over a Hugging Face cache that is made here."""

import json
from pathlib import Path

import msgspec
import pytest

from servd import cli
from servd.base.errors import ConfigError, ModelNotFound, NotEnoughMemory
from servd.base.sizes import MemoryPlan
from servd.checkpoint.short_names import full_name
from servd.cli import list as list_command
from servd.cli import plan, rm, run
from servd.config import Config

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


@pytest.mark.parametrize(("fits", "chosen"), [((None,), None), (("int8",), "int8"), ((), "")])
def test_the_first_quantization_that_fits_is_taken(monkeypatch, fits, chosen):
    def make_report(config: Config) -> plan.Report:
        report = plan_of(config)
        if config.model.quantization not in fits:
            report.plan = msgspec.structs.replace(report.plan, num_blocks=0)
        return report

    plan_of = plan.make_report
    monkeypatch.setattr(plan, "make_report", make_report)
    options = {"model": "demo", "device": "cpu"}
    if not fits:
        with pytest.raises(NotEnoughMemory, match="servd plan"):
            run.choose(options)
        return
    found, line = run.choose(options)
    assert found.get("quantization") == chosen
    assert line.startswith("demo: ") and "2048 tokens of context" in line
    assert isinstance(plan_of(Config.load(found)).plan, MemoryPlan)
