"""LLaVA: a picture becomes a square, for a tower such as CLIP's or SigLIP's."""

from collections.abc import Mapping
from typing import Any

from servd.worker.multimodal._processor import PIXELS, PilProcessor


class LlavaProcessor(PilProcessor):
    """Reads pictures of LLaVA."""

    kinds = ("CLIPImageProcessor", "LlavaImageProcessor", "SiglipImageProcessor")
    inputs = PIXELS

    def set_tokens(self) -> None:
        default = self.settings.get("image_token", "<image>")
        self.image_token = self.token("image_token", default)
        self.placeholder = self.image_token
        self.patch_size = self.settings.get("patch_size") or self.vision.get("patch_size", 14)

    def expand(self, outputs: Mapping[str, Any]) -> str:
        return self.image_token * self.num_square_tokens(outputs)

    def num_square_tokens(self, outputs: Mapping[str, Any]) -> int:
        """Return the image tokens of a square: its patches, and what the tower adds to them."""
        height, width = outputs["pixel_values"].shape[-2:]
        num_added = self.settings.get("num_additional_image_tokens")
        if num_added is None:  # CLIP adds a token for the whole
            num_added = 1 if str(self.vision.get("model_type", "clip")).startswith("clip") else 0
        strategy = self.settings.get("vision_feature_select_strategy")
        if strategy is None:
            strategy = self.config.get("vision_feature_select_strategy", "default")
        if strategy == "default":  # leaves out the first
            num_added -= 1
        return (height // self.patch_size) * (width // self.patch_size) + num_added
