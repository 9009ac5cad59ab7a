"""Tokenizers of GGUF files give the ids of transformers, and of SentencePiece's own rule."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from servd.api.text.tokenizer import Tokenizer
from servd.checkpoint import gguf_tokenizer, hub
from servd.checkpoint.gguf import TABLE
from tests.gguf_files import write_model

WORDS = (
    "the tokenizer of a file reads words and  spaces, the words of a file are read and then they "
    "are merged: reading, reader, readers; spacing, spaces. Ein Wort, zwei Wörter, drei Wörter. "
).split(" ")
TEXTS = [
    "the reader reads words",
    " leading and  double   spaces ",
    "Wörter, naïve café, 東京, 🙂🚀",
    "tabs\tand\nnew\n\nlines  \n",
    "I'll SAY they've 12345 words; can't YOU? HTTPServer fooBar 3.14",
    "e\u0301 composed, x=y+z*(w-1)//2",
    "",
    " ",
    "a",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def sentence_pieces(architecture: str) -> dict[str, Any]:
    """Metadata of a vocabulary with bytes, then pieces by score, as of Llama 2 and Gemma."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=220, show_progress=False)
    backend.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    learned = sorted(backend.get_vocab(), key=backend.token_to_id)
    learned.sort(key=lambda token: len(token) == 1)  # single characters come last
    is_gemma = architecture.startswith("gemma")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"]
    if not is_gemma:
        special = ["<unk>", "<s>", "</s>", "<|end|>"]
    tokens = [(token, 0.0, 2 if token == "<unk>" else 3) for token in special]
    tokens += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    tokens += [(" " * count, -1000.0, 4) for count in (2, 3, 4) if is_gemma]
    tokens += [(token, float(-rank), 1) for rank, token in enumerate(learned)]
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": [token for token, _, _ in tokens],
        "ggml.scores": [score for _, score, _ in tokens],
        "ggml.token_type": [kind for _, _, kind in tokens],
        "ggml.bos_token_id": special.index("<bos>" if is_gemma else "<s>"),
        "ggml.eos_token_id": special.index("<eos>" if is_gemma else "</s>"),
        "ggml.unknown_token_id": special.index("<unk>"),
        "ggml.add_bos_token": True,
        "ggml.add_space_prefix": not is_gemma,
    }


def byte_level(pre: str) -> dict[str, Any]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, special_tokens=["<|end|>"]
    )
    backend.train_from_iterator([*TEXTS, " ".join(WORDS)] * 20, trainer)
    backend.decoder = decoders.ByteLevel()
    tokens = sorted(backend.get_vocab(), key=backend.token_to_id)
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "ggml.merges": [" ".join(merge) for merge in merges],
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 0,
        "ggml.add_bos_token": False,
    }


def write(path: Path, model_type: str, vocabulary: dict[str, Any]) -> Path:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=len(vocabulary["ggml.tokens"]),
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=None,
        **sizes,
    )
    if model_type.startswith("gemma"):
        config.head_dim = 16
    model = transformers.AutoModelForCausalLM.from_config(config)
    return write_model(path, model, vocabulary=vocabulary)


def by_score(text: str, vocabulary: dict[str, Any]) -> list[str]:
    """SentencePiece's rule: merge the neighbors whose piece has the highest score, until none."""
    columns = (vocabulary[f"ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    scores = {token: score for token, score, kind in zip(*columns, strict=True) if kind == 1}
    prefix = "▁" if vocabulary["ggml.add_space_prefix"] else ""
    pieces = list(prefix + text.replace(" ", "▁"))
    while True:
        joined = [(scores.get(a + b, -1e9), -i) for i, (a, b) in enumerate(pairwise(pieces))]
        best, place = max(joined, default=(-1e9, 0))
        if best == -1e9:
            break
        pieces[-place : 2 - place] = ["".join(pieces[-place : 2 - place])]
    vocabulary = set(scores)
    return [
        part
        for piece in pieces
        for part in ([piece] if piece in vocabulary else [f"<0x{b:02X}>" for b in piece.encode()])
    ]


@pytest.mark.parametrize("model_type", ["llama", "phi3", "gemma2", "gemma3_text"])
def test_ids_of_sentence_piece(tmp_path: Path, model_type: str):
    vocabulary = sentence_pieces(model_type)
    file = write(tmp_path / "a.gguf", model_type, vocabulary)
    tokenizer = Tokenizer.load(str(hub.find_model(str(file))))
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    bos = vocabulary["ggml.bos_token_id"]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids[0] == bos and ids[1:] == tokenizer.encode(text, add_special_tokens=False)
        has_runs = "  " in text
        if text.strip() and not (has_runs or text.startswith(" ")):
            assert ids == reference.encode(text, add_special_tokens=True), text
        if text and not (model_type.startswith("gemma") and has_runs):
            token_names = [vocabulary["ggml.tokens"][i] for i in ids[1:]]
            assert token_names == by_score(text, vocabulary), text
        assert tokenizer.decode(ids[1:]) == text
    end = vocabulary["ggml.tokens"].index("<end_of_turn>" if "gemma" in model_type else "</s>")
    marked = f"read{vocabulary['ggml.tokens'][end]} words"
    assert end in tokenizer.encode(marked)


def test_runs_of_spaces_of_gemma_are_one_token(tmp_path: Path):
    vocabulary = sentence_pieces("gemma3_text")
    file = write(tmp_path / "a.gguf", "gemma3_text", vocabulary)
    tokenizer = Tokenizer.load(str(hub.find_model(str(file))))
    three = vocabulary["ggml.tokens"].index("   ")
    assert tokenizer.encode("   ", add_special_tokens=False) == [three]
    assert three in tokenizer.encode("words   words")


def test_spaces_after_special_tokens_of_phi3_are_dropped(tmp_path: Path):
    vocabulary = sentence_pieces("phi3")
    tokenizer = Tokenizer.load(
        str(hub.find_model(str(write(tmp_path / "a.gguf", "phi3", vocabulary))))
    )
    assert tokenizer.encode("<|end|>\nwords") == tokenizer.encode("<|end|>words")
    assert tokenizer.encode("<s>\nwords") != tokenizer.encode("<s>words")


@pytest.mark.parametrize("pre", [*TABLE["cuts"], *TABLE["aliases"]])
def test_ids_of_byte_level_tokenizers(tmp_path: Path, pre: str):
    file = write(tmp_path / "a.gguf", "qwen2", byte_level(pre))
    tokenizer = Tokenizer.load(str(hub.find_model(str(file))))
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    is_composed = TABLE["aliases"].get(pre, pre) == "qwen2"
    for text in TEXTS:
        ids = tokenizer.encode(text)
        # transformers leaves out the normalizer of Qwen, SmolLM's digits, and whole words of Llama.
        if text.isascii() and not any(map(str.isdigit, text)):
            assert ids == reference.encode(text, add_special_tokens=False), text
        if text.isascii() or not is_composed:
            assert tokenizer.decode(ids) == text


def test_llama_3_adds_its_first_token_unless_the_file_says_otherwise(tmp_path: Path):
    vocabulary = byte_level("llama-bpe")
    assert encode_with(tmp_path / "no.gguf", vocabulary) != 0
    del vocabulary["ggml.add_bos_token"]
    assert encode_with(tmp_path / "yes.gguf", vocabulary) == 0
    assert encode_with(tmp_path / "other.gguf", vocabulary | {"ggml.pre": "qwen2"}) != 0


def test_the_end_is_added_where_the_file_says_so(tmp_path: Path):
    vocabulary = byte_level("llama-bpe")
    end = len(vocabulary["ggml.tokens"]) - 1
    vocabulary |= {"ggml.eos_token_id": end, "ggml.add_eos_token": True}
    for adds_bos in (False, True):
        vocabulary["ggml.add_bos_token"] = adds_bos
        file = write(tmp_path / f"{adds_bos}.gguf", "qwen2", vocabulary)
        tokenizer = Tokenizer.load(str(hub.find_model(str(file))))
        plain = tokenizer.encode("words", add_special_tokens=False)
        begin = [0] * adds_bos
        assert tokenizer.encode("words") == [*begin, *plain, end]
        pair, _ = tokenizer.join_pair(plain, plain, (None, None), None)
        assert pair == [*begin, *plain, end, *plain, end]  # as llama.cpp ranks texts


@pytest.mark.parametrize("pre", [None, "default"])
def test_without_a_name_texts_are_cut_by_llama_cpps_default(tmp_path: Path, pre: str | None):
    """Punctuation alone first, then GPT-2's cut, then numbers by three digits."""
    vocabulary = byte_level("default")
    if pre is None:
        del vocabulary["ggml.pre"]
    folder = hub.find_model(str(write(tmp_path / "a.gguf", "qwen2", vocabulary)))
    backend = tokenizers.Tokenizer.from_file(str(gguf_tokenizer.write_tokenizer(folder)))
    pieces = backend.pre_tokenizer.pre_tokenize_str("Don't say $1,23456  (x=y) it's``")
    expected = "Don ' t Ġsay Ġ $ 1 , 234 56 ĠĠ ( x = y ) Ġit ' s ``"
    assert [piece for piece, _ in pieces] == expected.split(" ")


def encode_with(path: Path, vocabulary: dict[str, Any]) -> int:
    """The first id of a text."""
    file = write(path, "qwen2", vocabulary)
    return Tokenizer.load(str(hub.find_model(str(file)))).encode("words")[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ggml.scores", None),
        ("ggml.scores", [0.5]),
        ("ggml.scores", "x"),
        ("ggml.token_type", [1, 2]),
        ("ggml.unknown_token_id", 1 << 20),
        ("ggml.bos_token_id", 1 << 20),
        ("ggml.model", "t5"),
    ],
)
def test_damaged_vocabularies_are_refused_in_words(tmp_path: Path, key: str, value: Any):
    from servd.base.errors import ModelNotFound

    vocabulary = sentence_pieces("llama") | {key: value}
    vocabulary = {name: value for name, value in vocabulary.items() if value is not None}
    with pytest.raises(ModelNotFound):
        Tokenizer.load(str(hub.find_model(str(write(tmp_path / "a.gguf", "llama", vocabulary)))))


def test_long_pieces_and_too_many_merges_are_refused(monkeypatch: pytest.MonkeyPatch):
    def make(*lengths: int) -> str:
        tokens = ["a" * length for length in lengths]
        keys = {"tokens": tokens, "scores": [0.0] * len(tokens), "model": "llama"}
        values = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
        values["tokenizer.ggml.add_bos_token"] = False
        return gguf_tokenizer.make_tokenizer(values, "default")

    monkeypatch.setattr(gguf_tokenizer, "MAX_MERGES", 1000, raising=False)
    assert len(json.loads(make(*range(1, 40), 256))["model"]["merges"]) == 39 * 38 // 2
    with pytest.raises(ValueError, match="a piece of 257 characters"):
        make(1, 257)
    with pytest.raises(ValueError, match="10.. merges"):
        make(*range(1, 60))
