"""Qwen3-VL with experts."""

from servd.worker.multimodal._qwen import QwenProcessor


class Qwen3VLMoeProcessor(QwenProcessor):
    """Reads pictures of Qwen3-VL with experts."""
