"""The command line: flags become options, before files and environment; errors have code 2."""

import hashlib
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

import servd
from servd import cli
from servd.base import plugins
from servd.base.errors import ConfigError
from servd.config import AccessConfig, Config, choices, options_by_name
from servd.config.flag_aliases import ALIASES, HINTS, IGNORED, VALUE_ALIASES
from servd.config.keys import read_keys
from servd.terminal import engine_flags
from tests.limits import WAIT_SECONDS


def load(*args: str) -> Config:
    return Config.load(engine_flags.load_options(cli.make_parser().parse_args(["serve", *args])))


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch):
    monkeypatch.delenv("SERVD_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def test_no_flags_means_all_defaults():
    assert load() == Config()


def test_flags_of_every_kind():
    config = load(
        "org/model",
        "--port",
        "9",
        "--gpu-memory-utilization",
        "0.5",
        "--dtype",
        "float16",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--served-model-name",
        "a",
        "b",
        "--kv-cache-memory",
        "2GiB",
    )
    assert config == Config.load(
        {
            "model": "org/model",
            "port": 9,
            "gpu_memory_utilization": 0.5,
            "dtype": "float16",
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "served_model_name": ["a", "b"],
            "kv_cache_memory": 2 << 30,
        }
    )


@pytest.mark.parametrize(
    ("of_vllm", "options"),
    [
        ("m -tp 2 -pp 3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}),
        ("--model m --max_model_len=8K", {"max_model_len": 8192}),
        ("m --max-model-len 1.5k --dtype half", {"max_model_len": 1500, "dtype": "float16"}),
        ("m --max-model-len auto --load-format safetensors", {}),
        ("m --kv-cache-memory-bytes 4G", {"kv_cache_memory": 4 << 30}),
        ('m --allowed-origins ["*"]', {"allowed_origins": ["*"]}),
    ],
)
def test_flags_of_other_servers_mean_the_same_here(of_vllm, options):
    assert load(*of_vllm.split()) == Config.load({"model": "m"} | options)


def test_a_flag_without_an_effect_is_told(caplog):
    flags = ["--disable-log-requests", "--stream-interval", "8"]
    config = load(*flags, "--attention-backend", "FLASHINFER")
    assert config.parallel.attention_backend == "auto"
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "--attention-backend FLASHINFER has no effect",
        "--disable-log-requests has no effect",
        "--stream-interval has no effect",
    ]


def test_no_flag_of_another_server_hides_one_of_ours():
    ours = set(options_by_name())
    assert not ours & {name.removesuffix("=") for name in [*ALIASES, *IGNORED]}
    assert not ours & set(HINTS) and set(ALIASES.values()) <= ours
    for name, words in VALUE_ALIASES.items():
        for value in filter(None, words.values()):
            assert value in choices(options_by_name()[name][1].type)


def test_a_repeated_list_flag_adds_to_the_list():
    assert load("--api-key", "a", "--api-key", "b").access.api_key == ["a", "b"]


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    file = tmp_path / "servd.toml"
    file.write_text('model = "from-file"\nport = 1\nseed = 7\n')
    config = load("--config", str(file), "--port", "2")
    assert (config.model.model, config.server.port, config.model.seed) == ("from-file", 2, 7)


def test_the_api_key_of_the_environment_is_used_when_no_other_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("SERVD_API_KEY", "secret")
    assert load().access.api_key == ["secret"]
    assert load("--api-key", "other").access.api_key == ["other"]
    file = tmp_path / "servd.toml"
    file.write_text('api-key = ["of the file"]\n')
    assert load("--config", str(file)).access.api_key == ["of the file"]


def test_an_empty_key_in_the_environment_is_none(monkeypatch):
    monkeypatch.setenv("SERVD_API_KEY", "")
    assert load().access.api_key == []


def test_the_key_of_a_deployment_of_vllm_protects_servd_too(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert load().access.api_key == ["theirs"]
    monkeypatch.setenv("SERVD_API_KEY", "ours")
    assert load().access.api_key == ["ours"]


def test_a_configuration_error_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "--block-size", "0"])
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "servd: error: --block-size 0: must be a whole number >= 1\n"


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["serve", "--max-num-sequences=3"], "did you mean --max-num-seqs?"),
        (["bench", "throughput", "--num-promts", "3"], "did you mean --num-prompts?"),
        (["srve", "--port", "8000"], "did you mean serve?"),
        (["bench", "latncy"], "did you mean latency?"),
        (["serve", "--dtype", "bfloat61"], "did you mean bfloat16?"),
        (["chat", "--temprature", "1"], "did you mean --temperature?"),
        (["serve", "a", "b"], "unknown argument b; `servd serve --help` lists them"),
    ],
)
def test_an_unknown_argument_is_named_with_what_may_have_been_meant(args, hint, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    assert end.value.code == 2
    error_lines = capsys.readouterr().err.splitlines()
    assert error_lines[-1].endswith(hint) and len(error_lines) < 8


def test_measures_of_the_engine_need_no_client():
    """In a process of its own: here the modules may be imported already."""
    code = "import sys; sys.modules['aiohttp'] = None; import servd.bench.{}"
    for name in ("latency", "throughput", "spec"):
        command = [sys.executable, "-c", code.format(name)]
        subprocess.run(command, check=True, timeout=WAIT_SECONDS)


def test_the_help_is_one_screen_with_every_command(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    for name in plugins.names("servd.cli"):
        assert listed.count(name.replace("_", "-")) == 1


def test_without_a_command_the_help_is_an_error(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 2
    assert "run-batch" in capsys.readouterr().err


def test_the_version_is_a_line_or_all_that_a_bug_report_needs(capsys):
    missing = []
    for more in ([], ["--verbose"]):
        with pytest.raises(SystemExit) as end:
            cli.main(["--version", *more])
        assert end.value.code == 0
        missing.append(capsys.readouterr().out)
    assert missing[0] == f"servd {servd.__version__}\n"
    facts = dict(line.split(maxsplit=1) for line in missing[1].splitlines())
    assert facts["servd"].startswith(servd.__version__) and facts["torch"] == version("torch")
    assert {"Python", "transformers", "platform", "CPU", "GPUs"} <= facts.keys()


def test_a_new_key_is_an_entry_of_the_key_file(tmp_path, capsys):
    arguments = cli.make_parser().parse_args(
        ["key", "alice", "--scopes", "metrics", "admin", "--expires", "2027-01-31T00:00:00Z"]
    )
    assert arguments.run(arguments) == 0
    entry, secret = capsys.readouterr()
    file = tmp_path / "keys.toml"
    file.write_text(entry)
    [key] = read_keys(AccessConfig(api_key_file=str(file)))
    assert (key.name, key.scopes) == ("alice", {"metrics", "admin"})
    assert key.expires is not None and key.expires.year == 2027
    secret = secret.split()[-1]
    assert key.sha256 == hashlib.sha256(secret.encode()).hexdigest()
    assert len(secret) > 40 and secret not in entry


def test_a_key_needs_a_proper_name():
    arguments = cli.make_parser().parse_args(["key", "a b"])
    with pytest.raises(ConfigError, match="name"):
        arguments.run(arguments)


def test_a_reader_that_has_seen_enough_gets_no_traceback():
    program = [sys.executable, "-m", "servd", "key", "new"]
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(program, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert result.returncode == 141 and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "/models/M\udcf6del"],
        ["serve", "demo", "--served-model-name", "M\udcf6"],
        ["serve", "demo", "--chat-template", "\udcff"],
        ["rm", "\udcf6"],
        ["rm", "x" * 300],
        ["rm", "org/" + "x" * 300 + ":Q8_0"],
    ],
)
def test_words_that_cannot_be_names_are_a_sentence(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "servd: error: " in error and "Traceback" not in error
