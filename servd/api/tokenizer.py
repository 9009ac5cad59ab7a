"""Text to token ids and back, from tokenizer.json with the `tokenizers` library alone."""

from __future__ import annotations

from collections.abc import Sequence


class Tokenizer:
    """Encodes text; knows the exact bytes of every token.

    Attributes: `folder` ("" for the byte tokenizer), `config` (tokenizer_config.json), `special_ids: frozenset[int]`,
    `bos_token`, `eos_token: str | None`, `eos_token_id: int | None`, `vocab_size: int`.
    """

    @classmethod
    def load(cls, folder: str, trust_remote_code: bool = False) -> Tokenizer:
        """Raises ModelNotFound."""
        raise NotImplementedError

    @classmethod
    def bytes(cls) -> Tokenizer:
        """257 ids: the bytes and 256 = <eos>, for `--executor fake`."""
        raise NotImplementedError

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        raise NotImplementedError

    def token_string(self, token_id: int) -> str:
        """token_bytes as text, with U+FFFD for a part of a character."""
        raise NotImplementedError
