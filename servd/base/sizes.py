"""Memory sizes: parsing and formatting ("512M", "2GiB"), and the memory plan of a model."""

import math
import re

import msgspec

from servd.base.errors import ConfigError


def parse_bytes(text: str, flag: str) -> int:
    """Return the bytes of "1073741824", "1GiB", "1.5 GB" or "512M". K is 1024, KB is 1000."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B)?\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f'{flag}: cannot read {text!r} as a size; write bytes or e.g. "2GiB"')
    number, prefix, suffix = match.groups()
    base = 1000 if (suffix or "").upper() == "B" else 1024
    return int(float(number) * base ** " KMGT".index(prefix.upper() or " "))


def format_bytes(number: int) -> str:
    """Return a size as text for `parse_bytes`, rounded up to three digits: "72MiB", "1.25GiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            size = number / 1024**power
            digits = max(0, 2 - int(math.log10(size)))
            return f"{math.ceil(size * 10**digits) / 10**digits:g}{unit}"
    return f"{number}B"


def advise_more_memory(lacking: int, is_quantized: bool) -> str:
    """Return advice for a model that needs `lacking` more bytes of memory."""
    smaller = "a smaller model" if is_quantized else "try --quantization int8"
    return f"{format_bytes(lacking)} more memory, or a higher --tensor-parallel-size, or {smaller}"


class MemorySizes(msgspec.Struct, frozen=True, kw_only=True):
    """The device memory that each rank needs, in bytes."""

    weights: int
    tower: int  # weights that encode pictures
    encoder_cache: int  # encoded pictures, at most
    draft_weights: int
    adapters: int  # of --max-loras adapters
    requests: int  # token ids and block tables of max_num_seqs requests
    states: int  # recurrent states of these requests
    forward: int  # estimated peak of a forward pass
    sampling: int  # estimated peak of sampling
    kv_per_block: int
    per_checkpoint: int  # the recurrent states of a request

    @property
    def persistent(self) -> int:
        """All memory that is allocated permanently, except the KV cache and checkpoints."""
        weights = self.weights + self.tower + self.draft_weights + self.adapters
        return weights + self.encoder_cache + self.per_requests

    @property
    def per_requests(self) -> int:
        """The part of `persistent` that is proportional to max_num_seqs."""
        return self.requests + self.states

    @property
    def step(self) -> int:
        """The peak of a step's temporary memory."""
        return max(self.forward, self.sampling)


STEP_TOKENS = 1024  # of each request in the decode steps of a plan


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a decode step goes, in milliseconds: bytes that are moved, products that
    take longer than their bytes, and launches.
    """

    num_rows: int  # requests
    weights: float
    kv_cache: float
    activations: float
    products: float
    launches: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Return the milliseconds by field."""
        return {key: x for key, x in msgspec.structs.asdict(self).items() if key != "num_rows"}


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    dtype: str
    sizes: MemorySizes
    free: int  # bytes available
    num_blocks: int  # in the KV cache
    num_checkpoints: int  # of recurrent states
    kv_windows: tuple[int | None, ...]  # see WorkerReady
    steps: list[StepTime]  # estimates of decode steps on a known card
    shortage: str  # why not even one request fits, and a remedy; "" if it fits
