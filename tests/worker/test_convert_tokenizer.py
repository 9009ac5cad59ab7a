"""convert_tokenizer gives the tokens of the slow tokenizer that it was made from."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from servd.worker.loading.convert_tokenizer import main


def test_vocab_and_merges_become_tokenizer_json(tiny_gpt2_tokenizer: Path, tmp_path: Path):
    whole = json.loads((tiny_gpt2_tokenizer / "tokenizer.json").read_text())
    slow = tmp_path / "slow"
    fast = tmp_path / "fast"
    slow.mkdir()
    (slow / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in whole["model"]["merges"]
    ]
    (slow / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (slow / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert main([str(slow), str(fast)]) == 0
    text = "Licensed under the Apache License: naïve 123\n"
    expected = Tokenizer.from_file(str(tiny_gpt2_tokenizer / "tokenizer.json")).encode(text).ids
    assert Tokenizer.from_file(str(fast / "tokenizer.json")).encode(text).ids == expected


def test_failure_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path), str(tmp_path / "out")]) == 1
    assert "Error" in capsys.readouterr().err.splitlines()[0]
