"""Chooses the CPU kernels of a test, whatever servd would take here."""

from collections.abc import Iterator

import pytest

from servd.worker.ops import native

# Libraries that multiply integers; those that do so with bytes and exact activations, too.
INTEGER_SUMS = ("amx", "bf16", "vnni", "avxvnni", "avx2", "i8mm", "dotprod")
EXACT_SUMS = ("amx", "bf16", "vnni", "avxvnni", "i8mm", "dotprod")


def forced(switch: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The body of a fixture: SERVD_CPU_KERNELS=switch; skips where there are no such kernels."""
    monkeypatch.setenv(native.SWITCH, switch)
    native.library.cache_clear()
    if native.library() is None and switch != "off":
        native.library.cache_clear()
        pytest.skip(f"no {switch} kernels for this CPU, or servd was installed without a compiler")
    yield switch
    native.library.cache_clear()
