"""Memory of this process."""

import ctypes


def release_memory() -> None:
    """Return freed memory to the system. glibc would keep most of it."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
