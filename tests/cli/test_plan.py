"""`servd plan`: numbers for people and programs, and advice that holds when it is followed."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from servd import cli
from servd.base.sizes import parse_bytes
from servd.checkpoint import hub
from servd.checkpoint.facts import read_facts
from servd.checkpoint.hub import DEMO_FOLDER
from tests import vision_models
from tests.parity.families import CASES, make_checkpoint

SMALL = ["--max-model-len", "1024", "--max-num-seqs", "4"]


def plan(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", *args, "--json"])
    assert isinstance(end.value.code, int)
    return end.value.code, json.loads(capsys.readouterr().out)


def following(advice: str, what: str) -> list[str]:
    """The flags of a piece of advice, e.g. "lower --max-num-seqs to 3"."""
    hints = re.findall(rf"(--{what}) (?:to |could be )?([\w.]+)", advice)
    assert hints, advice
    return [part for pair in hints for part in pair]


def test_the_table_has_what_the_json_has(capsys):
    code, facts = plan(capsys, "demo", *SMALL, "--lengths", "100", "1024")
    assert code == 0 and facts["max_model_len"] == 1024 and facts["max_num_seqs"] == 4
    blocks = facts["num_blocks"]
    assert facts["requests"] == {"100": blocks // 7, "1024": blocks // 64}
    with pytest.raises(SystemExit):
        cli.main(["plan", "demo", *SMALL, "--lengths", "100"])
    rows = capsys.readouterr().out.split("\n")
    assert any(row.split() == ["100", str(blocks // 7)] for row in rows)


def test_a_card_that_this_machine_lacks(capsys):
    """A step takes its bytes at nine tenths of the bandwidth, and its launches."""
    code, facts = plan(capsys, "demo", *SMALL, "--device", "h100", "--dtype", "bfloat16")
    [step] = facts["steps"]
    assert code == 0 and facts["device"] == "h100" and step["num_rows"] == 1
    table = read_facts(str(DEMO_FOLDER))
    seconds = 2 * (table.num_parameters or 0) / (0.9 * 3.35e12)
    assert step["weights"] == pytest.approx(1e3 * seconds, rel=0.05)  # a padded vocabulary
    with pytest.raises(SystemExit):
        cli.main(["plan", "demo", *SMALL, "--device", "h100"])
    assert "bound by                launches" in capsys.readouterr().out


def test_the_fastest_checkpoint_that_fits(capsys):
    args = ["plan", "demo", "--device", "h100", "--max-model-len", "1024"]
    with pytest.raises(SystemExit) as end:
        cli.main([*args, "--compare", "int8"])
    *rows, _, last = capsys.readouterr().out.strip().split("\n")
    times = {row.split()[0]: float(re.findall(r" 1: ([\d.]+)", row)[0]) for row in rows[1:]}
    assert end.value.code == 0 and times.keys() == {"demo", "int8"}
    assert last.split()[-1] == min(times, key=times.__getitem__)


def test_a_checkpoint_that_cannot_run_is_a_row_of_the_comparison(capsys):
    """The A100 has no products of 8-bit floats."""
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "demo", *SMALL, "--device", "a100", "--compare", "fp8", "int4"])
    rows = {row.split(" ")[0]: row for row in capsys.readouterr().out.split("\n")}
    assert end.value.code == 0 and {"demo", "fp8", "int4"} < rows.keys()
    assert "9.0 (Hopper)" in rows["fp8"]


def test_times_with_adapters_and_without_graphs(capsys):
    """Times are those of CUDA graphs."""
    args = ["demo", *SMALL, "--device", "h100", "--dtype", "bfloat16"]
    _, plain = plan(capsys, *args)
    code, adapted = plan(capsys, *args, "--enable-lora")
    assert code == 0 and adapted["steps"] == plain["steps"] != []
    _, eager = plan(capsys, *args, "--enforce-eager")
    assert eager["steps"] == []


def test_the_kv_cache_is_larger_than_the_card(capsys):
    code, facts = plan(capsys, "demo", *SMALL, "--device", "h100", "--kv-cache-memory", "100GiB")
    assert code == 1 and facts["num_blocks"] == 0
    assert "--kv-cache-memory 100GiB" in facts["advice"][0]


@pytest.mark.parametrize(("memory", "start"), [("6MiB", "demo fits"), ("1MiB", "demo does not")])
def test_the_first_line_says_whether_it_fits(capsys, memory, start):
    with pytest.raises(SystemExit):
        cli.main(["plan", "demo", *SMALL, "--kv-cache-memory", memory])
    assert capsys.readouterr().out.startswith(start)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_type_of_weights_is_the_one_in_memory(capsys, dtype):
    """Kernels of the CPU keep 16 bits, and compute in 32."""
    _, facts = plan(capsys, "demo", *SMALL, "--device", "cpu", "--dtype", dtype)
    num_parameters = read_facts(str(DEMO_FOLDER)).num_parameters
    size = {"float32": 4, "bfloat16": 2}[facts["dtype"]]
    assert facts["sizes"]["weights"] == pytest.approx(size * num_parameters, rel=0.1)


def test_a_cache_for_fewer_than_all_requests(capsys):
    code, facts = plan(capsys, "demo", *SMALL, "--kv-cache-memory", "6MiB")
    (advice,) = facts["advice"]
    assert code == 0 and facts["requests"]["1024"] == 2
    cache = following(advice, "kv-cache-memory")
    for change in (
        following(advice, "max-num-seqs") + ["--kv-cache-memory", "6MiB"],
        following(advice, "max-model-len") + ["--kv-cache-memory", "6MiB"],
        cache,
    ):
        _, better = plan(capsys, "demo", *SMALL, *change)
        assert better["requests"][str(better["max_model_len"])] >= better["max_num_seqs"]
    less = str(parse_bytes(cache[1], "--kv-cache-memory") * 9 // 10)
    _, worse = plan(capsys, "demo", *SMALL, "--kv-cache-memory", less)
    assert worse["requests"]["1024"] < 4


def test_what_could_be_raised(capsys, monkeypatch):
    monkeypatch.setattr("servd.worker.runner.dry_run.available_memory", lambda: 200 << 20)
    _, facts = plan(capsys, "demo", *SMALL)
    assert facts["free"] == 200 << 20 and len(facts["advice"]) == 2
    for advice, option in zip(facts["advice"], ("max-num-seqs", "max-model-len"), strict=True):
        change = following(advice, option) + following(advice, "kv-cache-memory")
        _, more = plan(capsys, "demo", *SMALL, *change)
        assert more[option.replace("-", "_")] > facts[option.replace("-", "_")]
        assert more["requests"][str(more["max_model_len"])] >= more["max_num_seqs"]
        sizes = more["sizes"]
        step = max(sizes["forward"], sizes["sampling"])
        used_bytes = sizes["weights"] + sizes["requests"] + step
        assert used_bytes + more["num_blocks"] * sizes["kv_per_block"] <= 200 << 20


def test_states_take_their_part(capsys, monkeypatch, tmp_path):
    """Advice leaves room for as many checkpoints, and holds when it is followed."""
    folder = str(make_checkpoint(tmp_path, "qwen3_next", CASES["qwen3_next"]["experts"]))
    args = [folder, "--device", "cpu", "--max-num-seqs", "4"]
    with pytest.raises(SystemExit):
        cli.main(["plan", *args])
    rows = capsys.readouterr().out
    assert "states of requests" in rows and "checkpoints of states" in rows
    _, plain = plan(capsys, *args, "--no-enable-prefix-caching")
    assert plain["num_checkpoints"] == 0 < plain["sizes"]["states"]

    monkeypatch.setattr("servd.worker.runner.dry_run.available_memory", lambda: 8 << 20)
    code, facts = plan(capsys, *args, "--kv-cache-memory", "64KiB")
    assert code == 0 and facts["requests"]["128"] == 1
    change = following(facts["advice"][0], "kv-cache-memory|--max-state-memory")
    _, more = plan(capsys, *args, *change)
    assert more["requests"]["128"] == 4
    assert more["num_checkpoints"] == facts["num_checkpoints"] > 0

    code, facts = plan(capsys, *args, "--kv-cache-memory", "6900KiB")
    assert code == 1 and "--max-state-memory" in facts["shortage"]


@pytest.mark.parametrize("length", ["0", "9999999"])
def test_lengths_are_possible(capsys, length):
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "demo", *SMALL, "--lengths", length])
    assert end.value.code == 2 and "--lengths" in capsys.readouterr().err


def test_not_one_request_fits(capsys):
    code, facts = plan(capsys, "demo", *SMALL, "--kv-cache-memory", "1MiB")
    assert code == 1 and facts["num_blocks"] == 0
    assert "lower --max-model-len to 400" in facts["shortage"] == facts["advice"][0]


def test_weights_larger_than_memory(capsys, monkeypatch):
    monkeypatch.setattr("servd.worker.runner.dry_run.available_memory", lambda: 4 << 20)
    code, facts = plan(capsys, "demo", *SMALL)
    assert code == 1
    assert re.match(r"[\d.]+MiB more memory.*--quantization int8", facts["advice"][0])


def test_weights_of_the_hub_are_not_downloaded(tmp_path, capsys, monkeypatch):
    """Only headers are asked for, and the plan is that of the whole checkpoint."""
    import huggingface_hub

    metadata = tmp_path / "snapshot"
    metadata.mkdir()
    for file in DEMO_FOLDER.iterdir():
        if file.suffix == ".json":
            (metadata / file.name).write_bytes(file.read_bytes())
    headers = {}
    for file in DEMO_FOLDER.glob("*.safetensors"):
        with file.open("rb") as data:
            header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
        headers[file.name] = SimpleNamespace(
            tensors={
                name: SimpleNamespace(**tensor)
                for name, tensor in header.items()
                if name != "__metadata__"
            }
        )
    monkeypatch.setattr(hub, "_download", lambda *_: metadata)
    monkeypatch.setattr(
        huggingface_hub,
        "get_safetensors_metadata",
        lambda *_, **__: SimpleNamespace(files_metadata=headers),
    )
    _, there = plan(capsys, "some/model", *SMALL)
    _, here = plan(capsys, "demo", *SMALL)
    assert there["sizes"] == here["sizes"]
    assert not list(metadata.glob("*.safetensors"))


def test_more_requests_than_memory_holds(capsys, monkeypatch):
    monkeypatch.setattr("servd.worker.runner.dry_run.available_memory", lambda: 64 << 20)
    code, facts = plan(capsys, "demo", "--max-num-seqs", "100000")
    assert code == 1
    assert facts["advice"][0].startswith("lower --max-num-seqs: 100000 requests take ")


def test_the_tower_and_encoded_pictures_count(capsys, tmp_path):
    vision_models.make("smolvlm", tmp_path)
    options = ("--device", "cpu", "--max-model-len", "1024", "--encoder-cache-memory", "1MiB")
    _, facts = plan(capsys, str(tmp_path), *options)
    sizes = facts["sizes"]
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        names = list(file.keys())
        vision = [name for name in names if "vision" in name or "connector" in name]
        num_bytes = sum(file.get_tensor(name).nbytes for name in vision)
    assert sizes["tower"] == num_bytes > 0
    assert sizes["encoder_cache"] == 1 << 20
    with pytest.raises(SystemExit):
        cli.main(["plan", str(tmp_path), *options])
    assert re.search(r"vision tower .*\n.*encoded pictures +1MiB", capsys.readouterr().out)
    _, facts = plan(capsys, str(tmp_path), *options, "--language-model-only")
    assert facts["sizes"] == sizes | {"tower": 0, "encoder_cache": 0}
