"""Adapters: finds LoRA adapters by name, and loads and unloads them at run time."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from servd.api.engine.async_llm import AsyncLLM
from servd.base.errors import ConfigError, Forbidden, InvalidRequest, Unavailable
from servd.checkpoint.adapter_store import AdapterStore
from servd.checkpoint.lora import CONFIG, TENSORS, AdapterFiles
from servd.config import LoRAConfig
from servd.messages.adapter import Adapter
from servd.messages.engine import EngineReady

NAME = re.compile(r"\w[\w.:@-]*(?:/\w[\w.:@-]*)*", re.ASCII)
MAX_NAME = 256  # characters


@dataclass(eq=False)
class Adapters:
    """The loadable adapters. All API servers share the store, so all of them see each change."""

    config: LoRAConfig  # with enable_lora
    async_llm: AsyncLLM  # knows the layers of the model once that is loaded
    store: AdapterStore  # shared

    def __post_init__(self) -> None:
        config = self.config
        self.loading = ThreadPoolExecutor(1, "adapters")  # for waiting for the store's lock
        self.folder = None if config.lora_dir is None else Path(config.lora_dir).resolve()

    async def find(self, name: str) -> Adapter | None:
        """Return the adapter of this name; load it from --lora-dir if needed. None if unknown."""
        if (adapter := self.store.use(name)) is not None:
            return adapter
        if self.folder is None or len(name) > MAX_NAME or not NAME.fullmatch(name):
            return None
        at = self.folder / name
        if not await asyncio.to_thread(lambda: self._is_inside(at) and (at / CONFIG).is_file()):
            return None
        return await self._load(name, at, "keep")

    def listed(self) -> list[Adapter]:
        """Return the loaded adapters, and those of --lora-dir that no look at them has refused."""
        adapters = dict(self.store.read_adapters())
        is_ready = self.async_llm.is_ready
        for path in sorted(self.folder.glob(f"*/{CONFIG}")) if self.folder else ():
            at = path.parent
            name = at.name
            is_known = name in adapters or self.store.refusal(str(at)).exists()
            if not is_known and NAME.fullmatch(name) and self._is_inside(at):
                with suppress(OSError):  # deleted meanwhile
                    changed = path.stat().st_mtime, (at / TENSORS).stat().st_mtime
                    if self._fits(at, is_ready, *changed):
                        adapters[name] = Adapter(name, "", "", str(at), int(changed[0]))
        return list(adapters.values())

    @lru_cache(maxsize=1024)  # noqa: B019  # one object per process
    def _fits(self, at: Path, is_ready: bool, *changed: float) -> bool:
        """Return whether an adapter can be loaded. Before the model is ready, its layers are not
        checked. The result is cached by the modification times of the files.
        """
        ready = self.async_llm.status
        layers = ready.worker.adaptable if isinstance(ready, EngineReady) else {}
        try:
            files = AdapterFiles(at, allow_unknown_keys=self.store.allow_unknown_keys)
            files.check(self.config.max_lora_rank, layers)
        except ConfigError:
            return False
        return True

    async def load(self, name: str, path: str, in_place: bool) -> Adapter:
        """Load an adapter from a folder in --lora-dir for later requests. Running requests keep
        their adapters. With `in_place`, replace an adapter of the same name.

        Raises Forbidden: the path is not inside --lora-dir; InvalidRequest: the name or the adapter
        is not valid; Unavailable: the model is still loading.
        """
        if len(name) > MAX_NAME or not NAME.fullmatch(name):
            raise InvalidRequest(
                f"lora_name must be letters, digits, -, _, ., : and @, with / between parts, at "
                f"most {MAX_NAME} characters",
                param="lora_name",
            )
        if name in self.async_llm.config.model.served_model_name:
            raise InvalidRequest(f"{name!r} is the name of the model itself", param="lora_name")
        if self.folder is None:
            raise Forbidden(
                "loading adapters at run time needs --lora-dir: restart the server with it",
                param="lora_path",
            )
        at = self.folder / path  # an absolute path stays absolute
        if not await asyncio.to_thread(self._is_inside, at):
            raise Forbidden("lora_path must be a folder inside --lora-dir", param="lora_path")
        return await self._load(name, at, "replace" if in_place else "refuse")

    async def _load(
        self, name: str, at: Path, if_taken: Literal["replace", "keep", "refuse"]
    ) -> Adapter:
        ready = self.async_llm.status
        if not isinstance(ready, EngineReady):
            raise Unavailable("the model is still loading: retry later", retry_after=5)
        rank = self.config.max_lora_rank
        layers = ready.worker.adaptable
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self.loading, self.store.load, name, str(at), rank, layers, if_taken
            )
        except ConfigError as error:
            words = str(error).replace(f"{self.folder}/", "")  # not for clients
            param = "model" if if_taken == "keep" else "lora_path"
            raise InvalidRequest(words, param=param) from None

    async def unload(self, name: str) -> Adapter | None:
        """Unload and return an adapter; None if unknown. Running requests keep it."""
        return await asyncio.to_thread(self.store.unload, name)

    def _is_inside(self, at: Path) -> bool:
        """Return whether a folder and its files are inside --lora-dir after following symlinks."""
        assert self.folder is not None
        try:
            paths = [path.resolve() for path in (at, at / CONFIG, at / TENSORS)]
        except (OSError, ValueError, RuntimeError):  # too long, a zero byte, a loop of links
            return False
        return all(path.is_relative_to(self.folder) for path in paths) and paths[0] != self.folder
