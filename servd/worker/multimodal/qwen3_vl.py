"""Qwen3-VL."""

from servd.worker.multimodal.qwen2_5_vl import Qwen2_5_VLProcessor


class Qwen3VLProcessor(Qwen2_5_VLProcessor):
    """Reads pictures of Qwen3-VL."""
