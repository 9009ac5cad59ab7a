"""Qwen 3.5."""

from servd.worker.multimodal.qwen2_5_vl import Qwen2_5_VLProcessor


class Qwen3_5Processor(Qwen2_5_VLProcessor):
    """Reads pictures of Qwen 3.5."""
