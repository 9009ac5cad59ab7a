"""One file per attention backend, with a class `Backend`; tests/worker/attention runs its contract
over all files.
"""

from __future__ import annotations

import logging
from typing import Any

from servd import plugins
from servd.errors import ConfigError
from servd.worker.attention._base import AttentionSpec, Backend

log = logging.getLogger("servd.worker")

# For "auto", by type of the device: the fastest first. On CUDA not measured yet (`make bench-gpu`
# compares them): FlashAttention 3 is tuned by hand for the one chip that it runs on, the Triton
# kernels read the cache in place, FlashInfer is without graphs, and torch_sdpa copies what it
# reads.
PREFERENCE = {
    "cuda": ("varlen", "triton", "flashinfer", "torch_sdpa"),
    "cpu": ("native", "torch_sdpa"),
}


def make_backend(name: str, spec: AttentionSpec) -> tuple[str, Backend[Any]]:
    """The backend called `name`, or for "auto" the first that supports `spec`, with its name.

    Raises:
        ConfigError: no such backend, or it cannot run here; with its reason.
    """
    for candidate in PREFERENCE[spec.device.type] if name == "auto" else (name,):
        backend = plugins.load(__name__, candidate, "Backend")
        reason = backend.supports(spec)
        if reason is None:
            return candidate, backend(spec)
        if name != "auto":
            raise ConfigError(f"--attention-backend {name}: {reason}")
        log.info("not attention backend %s: %s", candidate, reason)
    raise AssertionError("torch_sdpa supports everything")
