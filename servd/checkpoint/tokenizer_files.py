"""The files of a tokenizer: finds tokenizer.json, or makes it once where other files add tokens or
it is missing. Tokens are those of transformers 5, whose precedence `read_tokenizer_config` has.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import msgspec

from servd.base.errors import ModelNotFound
from servd.base.python_command import python_command
from servd.checkpoint import gguf, gguf_tokenizer
from servd.checkpoint.account import Account, account_for
from servd.checkpoint.cached_folder import make_cached_folder
from servd.checkpoint.config_json import read_json
from servd.checkpoint.hub import find_model
from servd.checkpoint.model_spec import ModelSpec

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

CONFIG = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
ADDED = "added_tokens.json"
EXTRA = ("extra_special_tokens", "additional_special_tokens")  # the first wins
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Any of these can be converted to tokenizer.json by transformers.
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
CONVERTIBLE = (*PIECES, "vocab.json", "vocab.txt", "tekken.json")
# Their tokenizer_config.json does not change what tokenizer.json says.
GENERIC_CLASSES = (None, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")
AGREED = {
    "add_prefix_space": "add_prefix_space",
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
MAX_HEAD = 1 << 22  # bytes before the vocabulary of tokenizer.json
INPUTS = ("*.json", "*.model", "*.txt", "*.tiktoken", "*.py")


def tokenizer_folder(spec: ModelSpec, tokenizer: str | None, download_dir: str | None) -> str:
    """Return the folder of --tokenizer, which may be on the hub, or else the model's own."""
    return str(find_model(tokenizer, download_dir=download_dir)) if tokenizer else spec.folder


def find_tokenizer(folder: str, trust_remote_code: bool = False) -> Path:
    """Return the tokenizer.json of a model folder, or a file made once: from its slow tokenizer or
    GGUF file, or with the tokens that other files add. Raises ModelNotFound if there is no
    tokenizer, or it cannot be made.
    """
    file = Path(folder) / "tokenizer.json"
    if file.with_name(gguf.WEIGHTS).is_symlink():
        return file if file.exists() else gguf_tokenizer.write_tokenizer(Path(folder))
    if not file.exists():
        return _convert_tokenizer(Path(folder), trust_remote_code)
    try:
        tokens = _tokens_to_add(file)
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
        raise ModelNotFound(f"{folder}: its added tokens cannot be read: {error}") from None
    add = partial(_add_tokens, file, tokens)
    return _make_file(file.parent, add, repr(tokens)) if tokens else file


def read_backend(file: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json. Raises ModelNotFound if the file is broken."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except BaseException as error:  # the Rust library raises bare Exception, and panics
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ModelNotFound(f"{file} cannot be read: {error}") from None


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json and special_tokens_map.json, which wins, but is not read beside
    added_tokens_decoder.
    """
    config = read_json(folder / CONFIG, {})
    if config.get(EXTRA[1]) and not config.get(EXTRA[0]):
        config[EXTRA[0]] = config.pop(EXTRA[1])
    if "added_tokens_decoder" in config:
        return config
    special = read_json(folder / SPECIAL, {})
    stated = config.get(EXTRA[0]) or []
    if isinstance(stated, list) and isinstance(extra := special.get(EXTRA[0]), list):
        special[EXTRA[0]] = stated + [token for token in extra if token not in stated]
    return config | special


def tokenizer_accounts(folder: Path | str) -> Iterator[Account]:
    """Yield the accounts of the files that state a tokenizer's tokens."""
    folder = Path(folder)
    table = "tokenizer.json" if (folder / "tokenizer.json").exists() else "tokenizer.slow"
    config = read_json(folder / CONFIG, {})
    if config:
        yield account_for(CONFIG, config, "tokenizer", table)
    if special := read_json(folder / SPECIAL, {}):
        yield account_for(SPECIAL, special, "special_tokens_map")
    if table == "tokenizer.json" and config.get("tokenizer_class") not in GENERIC_CLASSES:
        with (folder / "tokenizer.json").open("rb") as file:
            head = file.read(MAX_HEAD).partition(b'"model":')[0].decode("utf8", "replace")
        contrary: dict[str, Any] = {}
        for key, leaf in AGREED.items():
            made = re.search(rf'"{leaf}":\s*(\w+)', head)
            if made and config.get(key) is not None and made[1] != json.dumps(config[key]):
                contrary[key] = config[key]
        scheme = re.search(r'"prepend_scheme":\s*"(\w+)"', head)
        if scheme and config.get("add_prefix_space") is (scheme[1] == "never"):
            contrary["add_prefix_space"] = config["add_prefix_space"]
        if contrary:
            yield Account(f"{CONFIG}, contrary to tokenizer.json,", unknown=contrary)


def _read_parts(file: Path) -> dict[str, msgspec.Raw]:
    """Return the parts of tokenizer.json undecoded, as most of it is a vocabulary."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError) as error:
        raise ModelNotFound(f"{file} cannot be read: {error}") from None


def _tokens_to_add(file: Path) -> list[AddedToken]:
    """Return the tokens that tokenizer.json lacks, or has with other flags, in their order."""
    from tokenizers import AddedToken

    config = read_tokenizer_config(file.parent)
    for key in NAMED:
        if not isinstance(config.get(key), (str, dict, NoneType)):
            raise TypeError(f"{key} {config[key]!r:.40} is no token")
    extra = config.get(EXTRA[0], config.get(EXTRA[1])) or []
    if not isinstance(extra, (list, dict)):
        raise TypeError(f"{EXTRA[0]} {extra!r:.40} is no list of tokens")
    more_tokens = [config[key] for key in config if key.endswith("_token") and key not in NAMED]
    if isinstance(extra, dict):
        more_tokens += extra.values()
        extra = []
    if not any(more_tokens):
        more_tokens = [*(config.get("model_specific_special_tokens") or {}).values()]
    special_tokens = _as_tokens([*map(config.get, NAMED), *more_tokens])
    extra = _as_tokens(extra)

    listed = msgspec.json.decode(_read_parts(file).get("added_tokens", b"[]"))
    present = {token.pop("id"): AddedToken(**token) for token in listed}
    same = {repr(token) for token in present.values()}  # before they are flagged below
    if (decoder := config.get("added_tokens_decoder")) is not None:
        stated = {int(number): AddedToken(**token) for number, token in decoder.items()}
    else:
        specials = {token.content for token in (*special_tokens, *extra)}
        stated = {
            number: AddedToken(token, special=token in specials, normalized=token not in specials)
            for token, number in read_json(file.with_name(ADDED), {}).items()
        }
        stated |= present
    tokens = [stated[number] for number in sorted(stated)]
    texts = {token.content for token in (*present.values(), *tokens)}
    for token in (*special_tokens, *extra):
        if token.content not in texts:
            texts.add(token.content)
            tokens.append(token)
    names = {token.content for token in special_tokens}
    for token in tokens:
        token.special = token.special or token.content in names
    return [token for token in tokens if repr(token) not in same]


def _as_tokens(values: Iterable[Any]) -> list[AddedToken]:
    """Return special tokens from texts and flags, without values that are neither."""
    from tokenizers import AddedToken

    tokens: list[AddedToken] = []
    for value in values:
        if isinstance(value, str):
            tokens.append(AddedToken(value, special=True))
        elif isinstance(value, dict):
            token = AddedToken(**{key: value[key] for key in value if key != "__type"})
            token.special = True
            tokens.append(token)
    return tokens


def _add_tokens(file: Path, tokens: list[AddedToken], made: Path) -> None:
    backend = read_backend(file)
    backend.add_tokens(tokens)
    made.mkdir()
    backend.save(str(made / file.name), pretty=False)


def _convert_tokenizer(folder: Path, trust_remote_code: bool) -> Path:
    """Return a tokenizer.json converted from the slow tokenizer in `folder`. A separate process
    converts it, because importing transformers takes seconds and hundreds of megabytes.
    """
    if not (trust_remote_code or any((folder / name).exists() for name in CONVERTIBLE)):
        raise ModelNotFound(
            f"{folder} has no tokenizer.json, and no tokenizer that servd can convert"
        )

    def convert(made: Path) -> None:
        module = "servd.worker.loading.convert_tokenizer"
        command = python_command(module, str(folder), str(made))
        if trust_remote_code:
            command.append("--trust-remote-code")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not (made / "tokenizer.json").exists():
            reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
            raise ModelNotFound(
                f"{folder} has no tokenizer.json, and its tokenizer cannot be converted: {reason}"
            )

    return _make_file(folder, convert, f"{version('transformers')} {trust_remote_code}")


def _make_file(folder: Path, make: Callable[[Path], None], version: str) -> Path:
    """Return a tokenizer.json that `make` writes to a folder in a cache of all servers, until one
    of the files that it may be made from changes.
    """
    files = sorted({x for pattern in INPUTS for x in folder.glob(pattern) if x.exists()})
    return make_cached_folder("tokenizers", files, version, make) / "tokenizer.json"
