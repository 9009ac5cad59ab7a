"""LoRA adapters of running requests. A request's first use of an adapter loads it into a slot."""

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from servd.base.errors import ConfigError, InvalidRequest
from servd.base.sizes import format_bytes
from servd.checkpoint.lora import TENSORS, AdapterFiles, parse_module
from servd.config import LoRAConfig
from servd.messages.adapter import Adapter
from servd.messages.engine import NewRequest
from servd.worker.batch.input_batch import InputBatch
from servd.worker.device.device import upload
from servd.worker.device.parallel import Parallel
from servd.worker.loading.model_loader import Model
from servd.worker.lora.layers import AdaptedMatrix, AdapterRows, adapt, layers_of

log = logging.getLogger("servd.worker")

Loaded = Sequence[tuple[AdaptedMatrix, int, Tensor, Tensor]]
"""What an adapter adds on this rank: matrix, part of it, and its two factors."""


def check_modules(config: LoRAConfig, model: Model) -> None:
    """Check that the adapters of --lora-modules fit a model, which may be without weights. Raises
    ConfigError: an adapter does not fit.
    """
    layers = layers_of(model)
    for entry in config.lora_modules:
        name, folder = parse_module(entry)
        if Path(folder).exists():  # the files may be gone since the start
            files = AdapterFiles(folder, name, allow_unknown_keys=True)  # checked when copied
            files.check(config.max_lora_rank, layers)


class AdapterSlots:
    """Loads the adapters of running requests into slots.

    If somebody replaces an adapter's files, running requests keep the old bytes.

    Args:
        model: loaded model; its linear layers are changed.
        device: device of the model.
        max_num_tokens: maximum tokens of a step.
        parallel: ranks that share the model.
    """

    def __init__(
        self,
        config: LoRAConfig,
        model: Model,
        dtype: torch.dtype,
        device: torch.device,
        max_num_seqs: int,
        max_num_tokens: int,
        parallel: Parallel,
    ) -> None:
        self.config = config
        self.parallel = parallel
        self.rows = AdapterRows(torch.full((max_num_tokens,), -1, dtype=torch.int64, device=device))
        self.targets = adapt(model, self.rows, config.max_loras, config.max_lora_rank, dtype)
        self.matrices = list(dict.fromkeys(target.matrix for target in self.targets.values()))
        self.dtype = dtype
        self.adapter_slot_of = np.full(max_num_seqs + 1, -1, dtype=np.int64)  # on the host
        # Adapter slot -> digest; the most recently used slot is last.
        self.adapter_slots = OrderedDict.fromkeys(range(config.max_loras), "")
        self.users: Counter[int] = Counter()  # running requests, by adapter slot
        self.kept: OrderedDict[str, Loaded] = OrderedDict()  # by digest, in the slots' format
        self.max_kept = config.max_cpu_loras or config.max_loras
        self.layers = layers_of(model)

    def __str__(self) -> str:
        room = f"{self.config.max_loras} of rank {self.config.max_lora_rank}"
        return (
            f"adapters: room for {room} on {len(self.layers)} layers, {format_bytes(self.nbytes)}"
        )

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes - matrix.base.nbytes for matrix in self.matrices)

    def add(self, request: NewRequest) -> None:
        """Load the adapter of a new request, if the request has one. Raises InvalidRequest: the
        adapter cannot be read, on this rank or another.
        """
        if request.adapter is None:
            return
        failure: Exception | None = None
        adapter_slot = -1
        try:
            adapter_slot = self._take_adapter_slot(request.adapter)
        except Exception as error:
            failure = error
        # All ranks get the same requests, so all of them meet here.
        if self.parallel.is_any(failure is not None):
            raise failure or InvalidRequest(
                f"the adapter {request.adapter.name} could not be loaded on all ranks: the log of "
                "another worker explains why"
            )
        self.adapter_slots.move_to_end(adapter_slot)
        self.users[adapter_slot] += 1
        self.adapter_slot_of[request.slot] = adapter_slot

    def occupy(self, slot: int) -> None:
        """Give a request's slot the first adapter slot, which is empty, until it is removed."""
        self.adapter_slot_of[slot] = 0
        self.users[0] += 1

    def _take_adapter_slot(self, adapter: Adapter) -> int:
        for adapter_slot, digest in self.adapter_slots.items():
            if digest == adapter.digest:
                return adapter_slot
        loaded = self._load(adapter)
        adapter_slot = next(slot for slot in self.adapter_slots if not self.users[slot])
        self.adapter_slots[adapter_slot] = ""  # until the adapter is loaded completely
        for matrix in self.matrices:
            matrix.clear(adapter_slot)
        for matrix, part, a, b in loaded:
            matrix.put(adapter_slot, part, a, b)
        self.adapter_slots[adapter_slot] = adapter.digest
        return adapter_slot

    def remove(self, slot: int) -> None:
        adapter_slot = int(self.adapter_slot_of[slot])
        if adapter_slot >= 0:
            self.users[adapter_slot] -= 1
            self.adapter_slot_of[slot] = -1

    def begin_step(self, batch: InputBatch) -> None:
        adapter_slots = self.adapter_slot_of[batch.host_slots]
        self.rows.is_active = bool((adapter_slots >= 0).any())
        if self.rows.is_active:
            of_tokens = np.repeat(adapter_slots, batch.query_lens)
            rows = self.rows.adapter_slots
            rows[: len(of_tokens)] = upload(of_tokens, rows.device)
            rows[len(of_tokens) :] = -1  # padding of a graph

    def _load(self, adapter: Adapter) -> Loaded:
        """Return an adapter from main memory, or read it from the copy of its files."""
        loaded = self.kept.pop(adapter.digest, None) or self._read(adapter)
        self.kept[adapter.digest] = loaded
        while len(self.kept) > self.max_kept:
            self.kept.popitem(last=False)
        return loaded

    def _read(self, adapter: Adapter) -> Loaded:
        try:
            files = AdapterFiles(adapter.folder, adapter.name, allow_unknown_keys=True)
            files.check(self.config.max_lora_rank, self.layers)
            loaded: list[tuple[AdaptedMatrix, int, Tensor, Tensor]] = []
            with safe_open(files.folder / TENSORS, framework="pt") as file:
                for module, (name_a, name_b, scale) in files.modules.items():
                    a = file.get_tensor(name_a).to(self.dtype)
                    b = (file.get_tensor(name_b).float() * scale).to(self.dtype)
                    if not (a.isfinite().all() and b.isfinite().all()):
                        raise ConfigError(f"the adapter {adapter.name}: {module} is not finite")
                    matrix, part = self.targets[module]
                    loaded += [(matrix, *share) for share in matrix.shares(part, a, b)]
        except (ConfigError, SafetensorError, OSError) as error:
            raise InvalidRequest(f"{error} (loaded as {adapter.digest[:12]})") from None
        log.info("adapter %s loaded (%s)", adapter.name, adapter.digest[:12])
        return loaded
