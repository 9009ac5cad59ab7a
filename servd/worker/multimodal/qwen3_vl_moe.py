"""Qwen3-VL with experts."""

from servd.worker.multimodal.qwen2_5_vl import Qwen2_5_VLProcessor


class Qwen3VLMoeProcessor(Qwen2_5_VLProcessor):
    """Reads pictures of Qwen3-VL with experts."""
