"""Chained block hashes: equal if and only if the blocks and all blocks before them are equal."""

from array import array
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256

NO_KEYS = bytes(32)


def root_hash(*keys: str | None) -> bytes:
    """Return the parent hash of a request's first block, computed from its cache keys, such as salt
    and adapter. Requests that differ in any key share no hash and therefore no block.
    """
    if not any(key is not None for key in keys):
        return NO_KEYS
    hashed = [bytes(32) if key is None else sha256(key.encode()).digest() for key in keys]
    return sha256(b"".join(hashed)).digest()


def block_hash(parent: bytes, token_ids: list[int], identifiers: Iterable[bytes] = ()) -> bytes:
    """Return the hash of a full block, given the hash of the block before it. `identifiers`: of the
    pictures that some of its tokens stand for.

    SHA-256, because a collision would reveal one client's context to another client.
    """
    return sha256(b"".join((parent, array("I", token_ids).tobytes(), *identifiers))).digest()


def of_group(block_hash: bytes, group: int) -> bytes:
    """Return the cache key of the block that holds these tokens for a group of layers."""
    return block_hash + bytes((group,)) if group else block_hash


@lru_cache(1 << 15)  # a waiting request is looked at in every step
def part_hash(block_hash: bytes, part: int) -> bytes:
    """Return the key of a part of the checkpoint after these tokens, in slots of host memory."""
    return sha256(b"state" + block_hash + part.to_bytes(4, "big")).digest()


def is_of_other_group(block_hash: bytes) -> bool:
    return len(block_hash) > len(NO_KEYS)
