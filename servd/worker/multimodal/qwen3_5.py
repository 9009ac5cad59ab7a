"""Qwen 3.5."""

from servd.worker.multimodal._qwen import QwenProcessor


class Qwen3_5Processor(QwenProcessor):
    """Reads pictures of Qwen 3.5."""
