"""Qwen2.5-VL."""

from servd.worker.multimodal._qwen import QwenProcessor


class Qwen2_5_VLProcessor(QwenProcessor):
    """Reads pictures of Qwen2.5-VL."""
