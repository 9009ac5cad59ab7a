"""Folders that servd creates once from a model's files, in a cache that all servers share."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def make_cached_folder(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """Return the cached folder for `kind` and `key`. If it is missing, call `make` with a path."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "servd", kind)
    target = cache / hashlib.sha256(key.encode()).hexdigest()[:24]
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch, "made")
        make(made)
        try:
            made.rename(target)
        except OSError:  # another server was faster
            if not target.exists():
                raise
    return target
