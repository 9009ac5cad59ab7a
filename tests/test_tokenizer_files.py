"""Tokens that stand outside tokenizer.json are those of transformers, in every layout of files."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import ModelNotFound
from servd.checkpoint import tokenizer_files
from servd.checkpoint.tokenizer_files import find_tokenizer, tokenizer_accounts

CONFIG = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
ADDED = "added_tokens.json"
TEXT = "the <end> of  <x> <y> [PAD]<think> a </s> <image> fox<x> <|end|> <z>"


def token(content: str, **flags: Any) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {"content": content, **plain, "special": True, **flags}


def typed(content: str, **flags: Any) -> dict[str, Any]:
    return {"__type": "AddedToken", **token(content, **flags)}


def unflagged(content: str, **flags: Any) -> dict[str, Any]:
    return {key: value for key, value in token(content, **flags).items() if key != "special"}


LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "decoder": {CONFIG: {"added_tokens_decoder": {"302": token("<x>"), "301": token("<y>")}}},
    "decoder, plain": {CONFIG: {"added_tokens_decoder": {"9": token("<x>", special=False)}}},
    "decoder, eos": {
        CONFIG: {"eos_token": "<end>", "added_tokens_decoder": {"1": token("<end>", special=False)}}
    },
    "decoder, strips": {
        CONFIG: {"added_tokens_decoder": {"2": token("<think>", lstrip=True, rstrip=True)}}
    },
    "decoder, words": {CONFIG: {"added_tokens_decoder": {"8": token("<x>", single_word=True)}}},
    "decoder, map": {
        CONFIG: {"added_tokens_decoder": {"302": token("<x>")}, "eos_token": "<x>"},
        SPECIAL: {"eos_token": "<y>", "pad_token": "[PAD]"},
    },
    "decoder, added": {
        CONFIG: {"added_tokens_decoder": {}, "pad_token": "[PAD]"},
        ADDED: {"<x>": 302},
    },
    "added": {ADDED: {"<y>": 303, "<x>": 302}},
    "added, named": {ADDED: {"<x>": 302, "<y>": 303}, SPECIAL: {"eos_token": "<x>"}},
    "additional": {CONFIG: {"additional_special_tokens": ["<x>", "<think>", typed("<y>")]}},
    "additional, added": {
        CONFIG: {"additional_special_tokens": ["<y>"]},
        ADDED: {"<x>": 302, "<y>": 303},
    },
    "additional of map": {SPECIAL: {"additional_special_tokens": ["<x>", "<y>"]}},
    "additional of both": {
        CONFIG: {"additional_special_tokens": ["<x>"]},
        SPECIAL: {"additional_special_tokens": ["<y>"]},
    },
    "extra and additional": {
        CONFIG: {"extra_special_tokens": ["<x>"], "additional_special_tokens": ["<y>"]}
    },
    "extra": {CONFIG: {"extra_special_tokens": ["<x>", "[PAD]"]}},
    "extra of both": {
        CONFIG: {"extra_special_tokens": ["<x>"]},
        SPECIAL: {"extra_special_tokens": ["<x>", unflagged("<y>", lstrip=True)]},
    },
    "extra, named": {CONFIG: {"extra_special_tokens": {"image_token": "<image>", "z": "<z>"}}},
    "specific": {CONFIG: {"model_specific_special_tokens": {"image_token": "<image>"}}},
    "specific, named": {
        CONFIG: {"model_specific_special_tokens": {"z": "<z>"}, "image_token": "<image>"}
    },
    "extra of map, named": {SPECIAL: {"extra_special_tokens": {"image_token": "<image>"}}},
    "named": {CONFIG: {"image_token": "<image>", "pad_token": typed("[PAD]", lstrip=True)}},
    "map": {SPECIAL: {"pad_token": "[PAD]", "eos_token": unflagged("<x>", lstrip=True)}},
    "map, image": {SPECIAL: {"image_token": "<image>"}},
    "map wins": {CONFIG: {"eos_token": "<end>"}, SPECIAL: {"eos_token": "</s>"}},
    "eos in the words": {CONFIG: {"eos_token": "the"}},
    "eos is not special": {CONFIG: {"eos_token": "<think>"}},
    "eos of map is not special": {SPECIAL: {"eos_token": "<think>"}},
    "split": {CONFIG: {"split_special_tokens": True, "pad_token": "[PAD]"}},
    "bos and eos": {CONFIG: {"add_bos_token": True, "add_eos_token": True, "bos_token": "</s>"}},
    "ignored": {
        CONFIG: {
            **{"eos_token": "<end>", "eos_token_id": 5, "pad_token_id": 6, "fast": False},
            **{"max_seq_length": 2, "return_tensors": "pt", "pretokenize_regex": " ?"},
            **{"clean_text": True, "wordpieces_prefix": "##", "tool_parser_type": "x"},
        }
    },
    "nulls": {CONFIG: {"eos_token": None, "additional_special_tokens": None}, SPECIAL: {}},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["</s>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the the fox of the end"] * 9, trainer)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend.to_str()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, file: str, contents: dict[str, dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(file)
    for name, content in contents.items():
        if name == CONFIG:
            content = {"tokenizer_class": "PreTrainedTokenizerFast"} | content
        (folder / name).write_text(json.dumps(content))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def check(folder: Path) -> Tokenizer:
    """Compare with transformers: ids, texts, the named tokens."""
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.load(str(folder))
    ids = tokenizer.encode(TEXT)
    assert ids == reference.encode(TEXT)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids, False) == reference.decode(ids)
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert tokenizer.bos_token == reference.bos_token
    assert tokenizer.vocab_size == len(reference)
    return tokenizer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_transformers(tmp_path: Path, file: str, layout: str):
    folder = write(tmp_path / "model", file, LAYOUTS[layout])
    check(folder)
    check(folder)  # from the cache
    assert not [account.unknown for account in tokenizer_accounts(folder) if account.unknown]


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "GPT2Tokenizer"])
def test_layouts_that_transformers_writes(tmp_path: Path, file: str, legacy: bool, name: str):
    config = {"tokenizer_class": name, "bos_token": "<end>", "unk_token": "<end>"}
    made = AutoTokenizer.from_pretrained(write(tmp_path / "model", file, {CONFIG: config}))
    made.add_tokens(["<y>"])
    made.add_special_tokens({"eos_token": "<x>", "additional_special_tokens": ["<z>"]})
    made.add_special_tokens({"pad_token": AddedToken("[PAD]", lstrip=True)})
    made.save_pretrained(tmp_path / "saved", legacy_format=legacy)
    check(tmp_path / "saved")


def test_a_file_that_lacks_nothing_is_used_where_it_lies(tmp_path: Path, file: str):
    decoder = {"0": token("</s>"), "1": token("<end>"), "290": token("<think>", special=False)}
    config = {"added_tokens_decoder": decoder, "eos_token": "<end>"}
    folder = write(tmp_path / "model", file, {CONFIG: config})
    assert find_tokenizer(str(folder)) == folder / "tokenizer.json"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (ADDED, '{"<y>": 300}'),
        (CONFIG, '{"additional_special_tokens": ["<z>"]}'),
        (SPECIAL, '{"pad_token": "<y>"}'),
        (SPECIAL, None),
        ("tokenizer.json", ""),
    ],
)
def test_a_made_file_is_made_again_when_an_input_changes(tmp_path: Path, file: str, name, content):
    folder = write(tmp_path / "model", file, {SPECIAL: {"pad_token": "[PAD]"}})
    made = find_tokenizer(str(folder))
    assert find_tokenizer(str(folder)) == made
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content or file.replace("<think>", "<thunk>"))
    assert find_tokenizer(str(folder)) != made
    check(folder)


def test_a_made_file_is_made_again_when_other_tokens_are_read(
    tmp_path: Path, file: str, monkeypatch
):
    write(tmp_path, file, {ADDED: {"<x>": 302}})
    made = find_tokenizer(str(tmp_path))
    (tmp_path / "gone.json").symlink_to("nowhere")  # is no input
    assert find_tokenizer(str(tmp_path)) == made
    tokens = [AddedToken("<z>", special=True)]  # as another version of servd reads them
    monkeypatch.setattr(tokenizer_files, "_tokens_to_add", lambda _: tokens)
    assert "<z>" in find_tokenizer(str(tmp_path)).read_text(encoding="utf8")


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"302": "<x>"}},
        {"added_tokens_decoder": {"x": token("<x>")}},
        {"added_tokens_decoder": [token("<x>")]},
        {"extra_special_tokens": 3},
    ],
)
def test_tokens_that_cannot_be_read_are_refused(tmp_path: Path, file: str, config):
    folder = write(tmp_path / "model", file, {CONFIG: config})
    with pytest.raises(ModelNotFound, match="added tokens"):
        Tokenizer.load(str(folder))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("GPT2Tokenizer", "add_prefix_space", True),
        ("GPT2Tokenizer", "add_prefix_space", False),
        ("GPT2TokenizerFast", "add_prefix_space", True),
        ("PreTrainedTokenizerFast", "add_prefix_space", True),
    ],
)
def test_keys_that_the_class_of_the_tokenizer_reads_are_not_contrary(
    tmp_path: Path, file: str, name: str, key: str, value: bool
):
    folder = write(tmp_path / "model", file, {CONFIG: {"tokenizer_class": name, key: value}})
    unknown = {key for account in tokenizer_accounts(folder) for key in account.unknown}
    reference = AutoTokenizer.from_pretrained(folder).encode("the fox")
    assert (Tokenizer.load(str(folder)).encode("the fox") == reference) is not bool(unknown)
    assert unknown <= {key}


@pytest.mark.parametrize("stated", [None, True, False])
@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_space_before_texts_that_the_class_adds_is_not_contrary(tmp_path, scheme: str, stated):
    backend = Backend(
        models.BPE({"<unk>": 0, "a": 1, "\u2581a": 2, "\u2581": 3}, [("\u2581", "a")])
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": stated}
    folder = write(tmp_path / "model", backend.to_str(), {CONFIG: config})
    reference = AutoTokenizer.from_pretrained(folder).encode("a", add_special_tokens=False)
    is_equal = Tokenizer.load(str(folder)).encode("a", add_special_tokens=False) == reference
    is_refused = any(account.unknown for account in tokenizer_accounts(folder))
    assert is_refused is (stated is (scheme == "never"))
    assert is_equal or is_refused or stated is None


@pytest.mark.parametrize("tokens", [{}, {"pad_token": "[PAD]"}])
def test_a_file_at_which_the_library_panics_is_refused(tmp_path: Path, file: str, tokens):
    broken = json.loads(file)
    broken["model"]["continuing_subword_prefix"] = "##"
    folder = write(tmp_path / "model", json.dumps(broken), {CONFIG: tokens})
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(str(folder))


@pytest.mark.parametrize(
    ("key", "leaf", "is_refused"),
    [
        ("do_lower_case", "lowercase", True),
        ("strip_accents", "strip_accents", True),
        ("tokenize_chinese_chars", "handle_chinese_chars", True),
        ("do_lower_case", "clean_text", False),
    ],
)
def test_keys_of_berts_class_are_not_contrary(tmp_path: Path, key: str, leaf: str, is_refused):
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "A": 2}, unk_token="[UNK]"))
    flags = {"lowercase": True, "strip_accents": True, "handle_chinese_chars": True}
    backend.normalizer = normalizers.BertNormalizer(**flags | {leaf: False})
    config = {"tokenizer_class": "BertTokenizer", key: True}
    folder = write(tmp_path / "model", backend.to_str(), {CONFIG: config})
    assert any(account.unknown for account in tokenizer_accounts(folder)) is is_refused


@pytest.mark.parametrize("key", ["fix_mistral_regex", "do_split_on_punc", "vocab_shift"])
def test_keys_that_could_change_tokens_are_unknown(tmp_path: Path, file: str, key: str):
    folder = write(tmp_path / "model", file, {CONFIG: {key: True}})
    assert [list(account.unknown) for account in tokenizer_accounts(folder)] == [[key]]


@pytest.mark.parametrize("key", ["legacy", "added_tokens_decoder", "lstrip"])
def test_a_map_of_special_tokens_has_nothing_else(tmp_path: Path, file: str, key: str):
    folder = write(tmp_path / "model", file, {SPECIAL: {key: True}})
    assert [list(account.unknown) for account in tokenizer_accounts(folder)] == [[key]]
