"""Tokenizer: converts text to token ids and back, using only the `tokenizers` library.

Every token stands for exact bytes. Output text is always these bytes decoded as UTF-8, so streamed
text, logprobs and complete text agree, whatever the tokenizer's decoder does.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from servd.base.errors import InvalidRequest, ModelNotFound
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.tokenizer_files import (
    NAMED,
    find_tokenizer,
    read_backend,
    read_tokenizer_config,
    tokenizer_folder,
)
from servd.config import Config

log = logging.getLogger("servd.api")

MAX_HELD_CHARS = 4096  # encoded in about a millisecond
MAX_WORD_CHARS = 256


class Tokenizer:
    """A tokenizer that knows the exact bytes of every token. It disables the backend's truncation
    and padding. `folder` is "" for the byte tokenizer.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], folder: str) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.folder = folder
        self.config = config
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens = _special_tokens(config)
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        decoder = backend.decoder.__getstate__().decode() if backend.decoder else ""
        self._is_byte_level = '"ByteLevel"' in decoder
        self._has_byte_fallback = '"ByteFallback"' in decoder
        # Whether the tokenizer loses no text, because there are tokens for all bytes.
        self.keeps_all_text = self._is_byte_level or self._has_byte_fallback
        # Tokens before a token whose text is wanted, as decoders drop a leading space.
        self._context = self.encode(" a", add_special_tokens=False)
        self._context_text = backend.decode(self._context, skip_special_tokens=False)
        self._bytes = _Table(self._make_bytes)
        # Visible special tokens -> table without the other special tokens.
        self._tables: dict[frozenset[int], _Table] = {}
        first = self._context[:1]
        text = "".join(self.token_string(i) for i in first)
        self.strips_leading_space = backend.decode(first) != text

    @classmethod
    def of_model(cls, config: Config, spec: ModelSpec) -> Tokenizer:
        """Return the tokenizer: --tokenizer, the model's own, or bytes for the fake model."""
        model = config.model
        folder = tokenizer_folder(spec, model.tokenizer, model.download_dir)
        tokenizer = cls.load(folder, model.trust_remote_code) if folder else cls.bytes()
        if tokenizer.vocab_size > spec.vocab_size:
            log.warning(
                "the tokenizer has %d tokens, the model %d: texts with the others are refused; is "
                "it another model's?",
                *(tokenizer.vocab_size, spec.vocab_size),
            )
        return tokenizer

    @classmethod
    def load(cls, folder: str, trust_remote_code: bool = False) -> Tokenizer:
        """Read a tokenizer's files; see `find_tokenizer` for what is converted. Raise ModelNotFound
        if the tokenizer is missing or broken.
        """
        file = find_tokenizer(folder, trust_remote_code)
        backend = read_backend(file)
        config = read_tokenizer_config(Path(folder))
        if file.parent != Path(folder):  # what a conversion made of the folder's tokens
            config |= read_tokenizer_config(file.parent)
        splits = config.get("split_special_tokens") or False
        if not isinstance(splits, bool):
            raise ModelNotFound(
                f"{folder}: split_special_tokens {splits!r:.40} is not true or false"
            )
        backend.encode_special_tokens = splits
        return cls(backend, config, folder)

    @classmethod
    def bytes(cls) -> Tokenizer:
        """Return the fake model's tokenizer of 257 tokens: ids 0 to 255 are bytes, 256 is <eos>."""
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(_BYTE_OF_CHAR), merges=[]))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        backend.add_special_tokens(["<eos>"])
        return cls(backend, {"eos_token": "<eos>"}, "")

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._backend.token_to_id(self.eos_token) if self.eos_token else None

    @property
    def adds_bos(self) -> bool:
        """Whether `encode` adds the beginning-of-sequence token."""
        bos = self._backend.token_to_id(self.bos_token) if self.bos_token else None
        return bos is not None and self.encode("")[:1] == [bos]

    def join_pair(
        self,
        first: list[int],
        second: list[int],
        keep: tuple[int | None, int | None],
        limit: int | None,
    ) -> tuple[list[int], int]:
        """Return the token ids of two texts with the special tokens around them, and the index
        where the second text begins, or 0 if the tokenizer has no token types.

        The texts, from `encode` without special tokens, are each truncated to `keep` tokens. If the
        result exceeds `limit`, the longer text is truncated, as in `tokenizers`.
        """
        head, middle, tail, has_types = self._around_pairs
        first = list(first[: keep[0]])
        second = list(second[: keep[1]])
        if limit is not None:
            room = max(limit - len(head) - len(middle) - len(tail), 0)
            shorter = min(len(first), len(second), room)
            longer = max(shorter, room - shorter)
            if shorter + longer > room:
                shorter = room // 2
                longer = room - room // 2
            is_swapped = len(first) > len(second)
            num_first, num_second = (longer, shorter) if is_swapped else (shorter, longer)
            first = first[:num_first]
            second = second[:num_second]
        start = len(head) + len(first) + len(middle)
        return [*head, *first, *middle, *second, *tail], start if has_types else 0

    @cached_property
    def _around_pairs(self) -> tuple[list[int], list[int], list[int], bool]:
        """The special tokens before, between and after two texts, and whether token types exist.

        `Encoding.truncate` is no alternative: `post_process` restores the truncated tokens.
        """
        first_ids = self._backend.encode("a", add_special_tokens=False)
        second_ids = self._backend.encode("b", add_special_tokens=False)
        pair = self._backend.post_process(first_ids, pair=second_ids)
        is_special = pair.special_tokens_mask
        begin = is_special.index(0)
        end = len(pair) - is_special[::-1].index(0)
        middle = slice(begin + len(first_ids), end - len(second_ids))
        return pair.ids[:begin], pair.ids[middle], pair.ids[end:], 1 in pair.type_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, which may contain special tokens. Do not use
        `add_special_tokens` for rendered chat templates, which contain BOS and the like.

        Raises InvalidRequest: `text` contains a lone surrogate, so it is not Unicode text, or the
        tokenizer has no tokens for it, or a pattern of its takes too many steps.
        """
        try:
            # `encode` holds the interpreter's lock, which would block all other requests.
            if len(text) > MAX_HELD_CHARS:
                encode = self._backend.encode_batch_fast
                return encode([text], add_special_tokens=add_special_tokens)[0].ids
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise InvalidRequest(
                "the text holds a lone surrogate (U+D800 to U+DFFF): not valid Unicode"
            ) from None
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # the Rust library raises bare Exception, or panics
            raise InvalidRequest(f"the model's tokenizer fails on the text: {error}") from None

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a complete sequence. Bytes that are not UTF-8 become U+FFFD."""
        table = self.byte_table(skip_special_tokens)
        text = b"".join([table[i] for i in token_ids]).decode("utf8", "replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def byte_table(
        self, skip_special_tokens: bool = True, visible_ids: frozenset[int] = frozenset()
    ) -> Mapping[int, bytes]:
        """Return the bytes of every token id. Unknown ids map to b"". With `skip_special_tokens`,
        so do special tokens other than `visible_ids`.
        """
        if not skip_special_tokens:
            return self._bytes
        if visible_ids not in self._tables:
            skipped = self.special_ids - visible_ids
            self._tables[visible_ids] = _Table(lambda i: b"" if i in skipped else self._bytes[i])
        return self._tables[visible_ids]

    @cached_property
    def longest_token(self) -> int:
        """The length in characters of the longest token. If the tokenizer drops text such as
        unknown words, at least MAX_WORD_CHARS.
        """
        longest = max(len(self._backend.id_to_token(i) or "") for i in range(self.vocab_size))
        return longest if self.keeps_all_text else max(longest, MAX_WORD_CHARS)

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with this text; None if there is no such token."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of a token, which may be an incomplete character."""
        return self._bytes[token_id]

    def token_string(self, token_id: int) -> str:
        """Return the bytes of a token as text. An incomplete character becomes U+FFFD."""
        return self._bytes[token_id].decode("utf8", "replace")

    def vocabulary_string(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it, e.g. with marks for blanks or bytes."""
        return self._backend.id_to_token(token_id) or ""

    def _make_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:  # models pad their vocabulary beyond the tokenizer's
            return b""
        if self._is_byte_level:
            is_text = token_id in self.added_ids or any(char not in _BYTE_OF_CHAR for char in token)
            return token.encode() if is_text else bytes([_BYTE_OF_CHAR[char] for char in token])
        if self._has_byte_fallback and (match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)):
            return bytes.fromhex(match[1])
        text = self._backend.decode([*self._context, token_id], skip_special_tokens=False)
        return text.removeprefix(self._context_text).encode()


class _Table(dict[int, bytes]):
    """The bytes of tokens, computed on first use: a large vocabulary takes memory and time."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, token_id: int) -> bytes:
        value = self.make(token_id)
        if value:  # ids without a token are not bounded, so they are not kept
            self[token_id] = value
        return value


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's byte alphabet: printable Latin-1 as itself, other bytes from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden_bytes = [byte for byte in range(256) if byte not in printable]
    hidden_bytes = {chr(0x100 + i): byte for i, byte in enumerate(hidden_bytes)}
    return {chr(byte): byte for byte in printable} | hidden_bytes


_BYTE_OF_CHAR = _byte_of_char()


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token` and so on as text. The file has strings or objects with `content`."""
    tokens: dict[str, str] = {}
    for name in NAMED:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[name] = text
    return tokens
