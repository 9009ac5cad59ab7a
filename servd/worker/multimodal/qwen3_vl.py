"""Qwen3-VL."""

from servd.worker.multimodal._qwen import QwenProcessor


class Qwen3VLProcessor(QwenProcessor):
    """Reads pictures of Qwen3-VL."""
