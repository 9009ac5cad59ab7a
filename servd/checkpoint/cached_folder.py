"""Folders that servd creates once from a model's files, in a cache that all servers share."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from servd.base.errors import ConfigError


def make_cached_folder(
    kind: str, files: Iterable[Path], version: str, make: Callable[[Path], None]
) -> Path:
    """Return the cached folder that was made from `files` as they are. If it is missing, call
    `make` with a path. Raise ConfigError if the cache cannot be used. `version`: of what is made.
    """
    stats = [(file.absolute(), file.stat()) for file in files]
    key = "".join(f"{path} {stat.st_size} {stat.st_mtime_ns} " for path, stat in stats) + version
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = Path(home, "servd", kind)
    target = cache / hashlib.sha256(key.encode()).hexdigest()[:24]
    try:
        if target.exists():
            return target
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "set XDG_CACHE_HOME to a folder that can be written"
        raise ConfigError(f"{cache}: {error.strerror}; {hint}") from None
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch, "made")
        make(made)
        try:
            made.rename(target)
        except OSError:  # another server was faster
            if not target.exists():
                raise
    return target
