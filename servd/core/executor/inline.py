"""The executor without a process of its own, under another name."""

from __future__ import annotations

from servd.core.executor import uniproc


class Executor(uniproc.Executor):
    """As uniproc."""
