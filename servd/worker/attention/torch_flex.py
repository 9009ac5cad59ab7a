"""The attention of torch, under another name."""

from __future__ import annotations

from servd.worker.attention import torch_sdpa


class Backend(torch_sdpa.Backend):
    """As torch_sdpa, and never chosen by "auto"."""

    auto_order = None
