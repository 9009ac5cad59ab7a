"""Qwen 3.5 with experts."""

from servd.worker.multimodal._qwen import QwenProcessor


class Qwen3_5MoeProcessor(QwenProcessor):
    """Reads pictures of Qwen 3.5 with experts."""
