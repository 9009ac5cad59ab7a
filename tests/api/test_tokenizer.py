"""Tokenizer against the `tokenizers` library, for all decoders that language models use."""

import itertools
import json
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import InvalidRequest, ModelNotFound
from servd.checkpoint.model_spec import FAKE_SPEC

ROOT = Path(__file__).resolve().parents[2]
GPT2_MERGES = ROOT.parent / "shared" / "data" / "gpt2" / "vocab.bpe"
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "Übergröße für alle! 你好",
    "def f(x):\n    return x + 1",
    "a a a",
]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
UNICODE_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def gpt2_backend() -> Backend:
    """GPT-2's tokenizer made of its published merges: bytes, merged pairs, end of text."""
    if not GPT2_MERGES.exists():
        pytest.skip("GPT-2's vocab.bpe is not in ../shared/data/gpt2")
    lines = GPT2_MERGES.read_text(encoding="utf8").splitlines()[1:]
    merges = [tuple(line.split(" ")) for line in lines if line]
    ranges = [("!", "~"), ("¡", "¬"), ("®", "ÿ")]
    printable = [code for first, last in ranges for code in range(ord(first), ord(last) + 1)]
    unprintable = [chr(256 + i) for i in range(256 - len(printable))]
    alphabet = [chr(byte) for byte in printable] + unprintable
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return backend


def llama2_backend(strip: bool = True) -> Backend:
    """SentencePiece-like BPE with byte fallback: Llama 2 with `strip`, Gemma without."""
    trained = Backend(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    options = {"special_tokens": ["<unk>", "<s>", "</s>"], "show_progress": False}
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=150, **options))
    model = json.loads(trained.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), *BYTE_TOKENS]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(pair) for pair in model["merges"]]
    options = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, **options))
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strip else replace
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * strip)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return backend


def unigram_backend() -> Backend:
    """Unigram with metaspaces, as in T5 and XLM-R."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


BACKENDS = {
    "llama2": llama2_backend,
    "gemma": lambda: llama2_backend(strip=False),
    "unigram": unigram_backend,
    "gpt2": gpt2_backend,
}


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def backend(request) -> Backend:
    return BACKENDS[request.param]()


@pytest.fixture(scope="module")
def tokenizer(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, {}, "")


@given(
    text=st.one_of(
        UNICODE_TEXT, st.sampled_from(CORPUS), st.text("the quick brown fox", max_size=30)
    )
)
def test_decode_equals_the_library(tokenizer: Tokenizer, backend: Backend, text: str):
    for add_special_tokens in (True, False):
        ids = tokenizer.encode(text, add_special_tokens)
        assert ids == backend.encode(text, add_special_tokens=add_special_tokens).ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


@given(data=st.data())
def test_any_tokens_decode_as_in_the_library(tokenizer: Tokenizer, backend: Backend, data):
    """With byte fallback, the library answers U+FFFD per byte of the whole run."""
    if b"ByteFallback" in backend.decoder.__getstate__():
        ids = st.integers(0, tokenizer.vocab_size - 1 - len(BYTE_TOKENS))
    else:
        some = st.integers(0, min(255, tokenizer.vocab_size - 1))
        ids = st.integers(0, tokenizer.vocab_size - 1) | some
    token_ids = data.draw(st.lists(ids, max_size=12))
    assert tokenizer.decode(token_ids) == backend.decode(token_ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
def test_token_bytes_add_up_to_the_text(text: str):
    for tokenizer in (BYTES, LLAMA2):
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(tokenizer.token_bytes, ids))
        assert joined.decode().removeprefix(" " * tokenizer.strips_leading_space) == text


BYTES = Tokenizer.bytes()
LLAMA2 = Tokenizer(llama2_backend(), {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, "")


def test_byte_tokenizer_is_the_fake_models():
    assert BYTES.vocab_size == FAKE_SPEC.vocab_size
    assert [BYTES.eos_token_id] == FAKE_SPEC.eos_token_ids
    assert BYTES.encode("hé") == [104, 0xC3, 0xA9]
    assert [BYTES.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert BYTES.decode([104, 256]) == "h"
    assert BYTES.decode([104, 256], skip_special_tokens=False) == "h<eos>"


def test_special_tokens():
    assert LLAMA2.bos_token == "<s>" and LLAMA2.eos_token == "</s>"
    assert LLAMA2.adds_bos and not BYTES.adds_bos
    assert LLAMA2.encode("</s>", add_special_tokens=False)[-1] == LLAMA2.eos_token_id
    assert LLAMA2.eos_token_id in LLAMA2.special_ids
    assert LLAMA2.token_bytes(LLAMA2.vocab_size + 5) == b""  # models pad their vocabulary


def test_token_string_of_a_part_of_a_character():
    assert BYTES.token_string(0xC3) == "\ufffd"
    assert LLAMA2.token_bytes(LLAMA2.encode("€", add_special_tokens=False)[-1]) == "€".encode()[-1:]


@pytest.mark.parametrize("length", [60, 6000])
def test_a_pattern_that_explodes_ends_the_text_alone(length: int):
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer = Tokenizer(backend, {}, "")
    with pytest.raises(InvalidRequest, match="retry-limit"):
        tokenizer.encode("a" * length + "!")
    assert tokenizer.encode("ab") == [0, 1]


def test_a_text_without_tokens_is_the_clients_error():
    vocabulary = [("a", -1.0), (" ", -1.0)]
    tokenizer = Tokenizer(Backend(models.Unigram(vocabulary, unk_id=None)), {}, "")
    with pytest.raises(InvalidRequest, match="unk"):
        tokenizer.encode("b")


def test_lone_surrogate_is_the_clients_error():
    with pytest.raises(InvalidRequest, match="surrogate"):
        BYTES.encode("a\ud800")


def test_lone_surrogate_in_a_long_text_is_the_clients_error():
    with pytest.raises(InvalidRequest, match="surrogate"):
        BYTES.encode("a" * 10_000 + "\ud800")


def test_long_texts_are_encoded_like_short_ones():
    text = "the licence <eos> grants é " * 1000
    assert BYTES.encode(text) == BYTES.encode("the licence <eos> grants é ") * 1000


def test_a_long_text_does_not_hold_up_other_threads():
    thread = threading.Thread(target=BYTES.encode, args=["the licence " * 100_000])
    num_turns = 0
    thread.start()
    while thread.is_alive():
        num_turns += 1
        time.sleep(0.001)
    assert num_turns > 4  # two, if the other thread never let go


def test_truncation_of_the_file_is_ignored(tmp_path: Path):
    backend = llama2_backend()
    backend.enable_truncation(max_length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    tokenizer = Tokenizer.load(str(tmp_path))
    assert len(tokenizer.encode("the quick brown fox")) > 4
    assert tokenizer.bos_token == "<s>" and tokenizer.eos_token is None


def test_no_tokenizer(tmp_path: Path):
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json"):
        Tokenizer.load(str(tmp_path))


def test_broken_tokenizer(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="cannot be read"):
        Tokenizer.load(str(tmp_path))


def converter(folder: Path, body: str) -> str:
    """A Python that is called as `python -m servd.worker.loading.convert_tokenizer SRC DST`."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nshift 2\necho run >> "{folder}/runs"\n{body}\n')
    script.chmod(0o755)
    return str(script)


def test_a_slow_tokenizer_is_converted_once(tmp_path: Path, monkeypatch):
    llama2_backend().save(str(tmp_path / "made.json"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.model").touch()
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    body = f'mkdir "$2" && cp "{tmp_path}/made.json" "$2/tokenizer.json"'
    monkeypatch.setattr(sys, "executable", converter(tmp_path, body))
    for _ in range(2):
        tokenizer = Tokenizer.load(str(model))
        assert tokenizer.eos_token_id == LLAMA2.eos_token_id
        assert tokenizer.encode("a dog") == LLAMA2.encode("a dog")
    assert (tmp_path / "runs").read_text() == "run\n"
    assert not list(model.glob("tokenizer.json"))  # model folders may be read-only
    (model / "tokenizer_config.json").write_text('{"eos_token": "</s>", "add_bos_token": false}')
    Tokenizer.load(str(model))
    (model / "added_tokens.json").write_text("{}")
    Tokenizer.load(str(model))
    (model / "added_tokens.json").unlink()
    Tokenizer.load(str(model))
    Tokenizer.load(str(model), trust_remote_code=True)
    (model / "tokenizer.model").write_text("changed")
    Tokenizer.load(str(model))
    assert (tmp_path / "runs").read_text() == 5 * "run\n"


def test_a_failed_conversion_names_the_reason(tmp_path: Path, monkeypatch):
    (tmp_path / "tokenizer.model").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    python = converter(tmp_path, "echo the file is empty >&2; exit 1")
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(ModelNotFound, match="the file is empty"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("has_specials", [False, True])
def test_of_two_texts_the_longer_is_cut_as_tokenizers_does_it(has_specials):
    backend = llama2_backend()
    if has_specials:
        backend.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    tokenizer = Tokenizer(backend, {}, "")
    for num_first, num_second, limit in itertools.product(
        (1, 3, 8, 9), (1, 2, 9, 10), range(5, 22)
    ):
        pair = "q z x v w k j h p"[:num_first], "z q k v j x h w p f"[:num_second]
        backend.enable_truncation(limit)
        expected = backend.encode(*pair)
        backend.no_truncation()
        first, second = (tokenizer.encode(text, False) for text in pair)
        got, start = tokenizer.join_pair(first, second, (None, None), limit)
        assert got == expected.ids
        types = expected.type_ids
        assert start == (types.index(1) if 1 in types else 0)


def test_two_long_texts_of_which_little_is_kept():
    """A second, and not what `tokenizers` needs: half a minute and 3 GB for a hundredth of it."""
    tokenizer = Tokenizer.bytes()
    got = tokenizer.join_pair([*b"ab" * 50_000], [*b"c" * 100_000], (2, 1), None)
    assert got == ([*b"abc"], 0)
