"""Chained block hashes: equal if and only if the blocks and all before them hold equal tokens."""

from __future__ import annotations

from array import array
from hashlib import sha256

NO_SALT = bytes(32)


def root_hash(salt: str | None) -> bytes:
    """Parent of a request's first block. Different salts share no hash, hence no block."""
    return NO_SALT if salt is None else sha256(salt.encode()).digest()


def block_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """Hash of one full block, given the hash of the block before it.

    SHA-256, because a collision would show one client the context of another.
    """
    return sha256(parent + array("I", token_ids).tobytes()).digest()
