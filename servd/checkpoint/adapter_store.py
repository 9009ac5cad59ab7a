"""AdapterStore: the loaded LoRA adapters, shared by all processes of a server.

The store has a copy of each adapter under a hash of its contents, and a table of names. A request
carries the hash. It therefore uses the same adapter for all its tokens, even if the name is
reassigned or the engine restarts.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, Self

import msgspec

from servd.base.errors import ConfigError
from servd.checkpoint import account
from servd.checkpoint.lora import CONFIG, TENSORS, AdapterFiles, Shape
from servd.messages.adapter import Adapter

KEEP_SECONDS = 3600  # that the files of a replaced adapter stay, for requests that have it
MAX_ON_DEMAND = 64  # adapters loaded by requests; the least recently used one goes


class AdapterStore:
    """The table of adapters and the copies of their files, in a folder that all processes share.
    Changes need a lock, and are visible to all processes at once.
    """

    def __init__(self, folder: str | Path, allow_unknown_keys: bool = False) -> None:
        self.folder = Path(folder)
        self.allow_unknown_keys = allow_unknown_keys
        self._table = self.folder / "adapters.json"
        # As last read, and the inode and time of it; one attribute, as threads share it.
        self._last: tuple[tuple[int, int], dict[str, Adapter]] | None = None

    @classmethod
    def beside(cls, ipc_dir: str, allow_unknown_keys: bool = False) -> Self:
        return cls(Path(ipc_dir, "adapters"), allow_unknown_keys)

    def read_adapters(self) -> dict[str, Adapter]:
        """Return all adapters by name. The table is read again only if it has changed."""
        try:
            status = os.stat(self._table)
        except OSError:
            return {}
        last = self._last
        state = (status.st_ino, status.st_mtime_ns)
        if last is None or last[0] != state:
            adapters = msgspec.json.decode(self._table.read_bytes(), type=list[Adapter])
            self._last = last = state, {adapter.name: adapter for adapter in adapters}
        return last[1]

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def load(
        self,
        name: str,
        source: str,
        max_rank: int,
        layers: Mapping[str, Shape],
        if_taken: Literal["replace", "keep", "refuse"] = "replace",
    ) -> Adapter:
        """Copy an adapter and register its name, which may replace another adapter. Return the
        adapter. Raises ConfigError if the adapter is not valid, cannot be copied or is refused.

        With "keep", files that were not valid are refused unread until they change.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            if if_taken != "replace" and (present := self.read_adapters().get(name)) is not None:
                if if_taken == "keep":
                    return present
                raise ConfigError(
                    f"the adapter {name!r} is loaded already: set load_inplace to replace it"
                )
            refusal = self.refusal(source)
            if if_taken == "keep":
                with suppress(FileNotFoundError):  # another process may remove it at any time
                    raise ConfigError(refusal.read_text("utf8", "surrogateescape"))
            copy = self.folder / f"loading-{os.getpid()}"
            try:
                allows = self.allow_unknown_keys
                files = AdapterFiles(source, source, allows)
                files.check(max_rank, layers)  # or any size would be copied
                account.check([files.account], allows)
                digest = self._copy(Path(source), copy)
                files = AdapterFiles(copy, source, allows)
                files.check(max_rank, layers)
                files.check_values()
                folder = self.folder / digest
                if not folder.exists():
                    copy.rename(folder)
                refusal.unlink(missing_ok=True)
            except ConfigError as error:
                # What the system refused may work later, though the files stay the same.
                if not isinstance(error.__context__, OSError):
                    with suppress(OSError):  # no space is left
                        refusal.write_text(str(error), "utf8", "surrogateescape")
                raise
            except OSError as error:
                raise ConfigError(f"the adapter {source} cannot be copied: {error}") from None
            finally:
                shutil.rmtree(copy, ignore_errors=True)
            os.utime(folder)
            on_demand = if_taken == "keep"
            adapter = Adapter(name, digest, str(folder), source, int(time.time()), on_demand)
            adapters = {**self.read_adapters(), name: adapter}
            waiting = sorted(
                (adapter for adapter in adapters.values() if adapter.is_on_demand), key=_used_at
            )
            for unused in waiting[:-MAX_ON_DEMAND]:
                del adapters[unused.name]
            self._write(adapters)
        return adapter

    def use(self, name: str) -> Adapter | None:
        if (adapter := self.read_adapters().get(name)) is not None and adapter.is_on_demand:
            self._touch([adapter])
        return adapter

    def unload(self, name: str) -> Adapter | None:
        """Remove and return the adapter of a name; None if there is none."""
        if name not in self.read_adapters():
            return None
        with self._locked():
            adapters = {**self.read_adapters()}
            adapter = adapters.pop(name, None)
            self._write(adapters)
        return adapter

    def refusal(self, source: str) -> Path:
        """Return the file with the reason why the files in a folder, as they are now, were not
        valid. It exists if `load` has refused them.
        """
        state = []
        for name in (CONFIG, TENSORS):
            with suppress(OSError):  # it is missing
                status = os.stat(Path(source, name))
                place = status.st_dev, status.st_ino  # a path could be written in many ways
                state.append((*place, status.st_size, status.st_ctime_ns))
        return self.folder / f"refused-{hashlib.sha256(str(state).encode()).hexdigest()}"

    def _copy(self, source: Path, copy: Path) -> str:
        """Copy an adapter and return its digest."""
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(mode=0o700)
        digest = hashlib.sha256()
        for name in (CONFIG, TENSORS):
            shutil.copyfile(source / name, copy / name)
            with (copy / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def _write(self, adapters: Mapping[str, Adapter]) -> None:
        kept = {adapter.digest for adapter in adapters.values()}
        # What nobody can name any more stays for a while from now on.
        self._touch(
            adapter for adapter in self.read_adapters().values() if adapter.digest not in kept
        )
        new = self._table.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(list(adapters.values())))
        now = time.time_ns()
        os.utime(new, ns=(now, now))  # the file system's own clock may tick every 4 ms
        new.rename(self._table)
        for folder in self.folder.iterdir():
            if folder.is_dir() and folder.name not in kept:
                if time.time() - folder.stat().st_mtime > KEEP_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)

    def _touch(self, adapters: Iterable[Adapter]) -> None:
        for adapter in adapters:
            with suppress(FileNotFoundError):
                os.utime(adapter.folder)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _used_at(adapter: Adapter) -> int:
    try:
        return os.stat(adapter.folder).st_mtime_ns
    except OSError:
        return 0
