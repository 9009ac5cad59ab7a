"""Pixtral: pictures of any size, row by row."""

from collections.abc import Mapping
from typing import Any

from servd.worker.multimodal._processor import LOW_SIDE, SIZED_PIXELS, PilProcessor

PIXTRAL = "PixtralImageProcessor"


class PixtralProcessor(PilProcessor):
    """Reads pictures of models with a Pixtral tower."""

    kinds = (PIXTRAL,)
    inputs = SIZED_PIXELS
    has_fixed_size = False

    def set_tokens(self) -> None:
        self.image_token = self.settings.get("image_token", "[IMG]")
        self.end_of_row = self.settings.get("image_break_token", "[IMG_BREAK]")
        self.end = self.settings.get("image_end_token", "[IMG_END]")
        self.placeholder = self.image_token
        # Pixels of a side that become an image token.
        self.token_side = self.settings.get("patch_size", 16)
        self.token_side *= self.settings.get("spatial_merge_size", 1)

    def family_settings(self) -> dict[str, Any]:
        return {"patch_size": self.token_side}

    def low_options(self) -> dict[str, Any]:
        longest = self.high.size.longest_edge or LOW_SIDE
        return {"size": {"longest_edge": min(longest, LOW_SIDE)}}

    def expand(self, outputs: Mapping[str, Any]) -> str:
        [(height, width)] = outputs["image_sizes"]
        row = self.image_token * (width // self.token_side)
        return self.end_of_row.join([row] * (height // self.token_side)) + self.end
