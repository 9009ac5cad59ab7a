"""Mistral 3: a Pixtral tower, of which it merges patches."""

from servd.worker.multimodal._pixtral import PixtralProcessor


class Mistral3Processor(PixtralProcessor):
    """Reads pictures of Mistral 3."""
