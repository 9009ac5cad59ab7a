"""Mistral 3 and Pixtral: pictures of any size, row by row."""

from collections.abc import Mapping
from typing import Any

from PIL import Image

from servd.worker.multimodal import Detail, ProcessedImage
from servd.worker.multimodal._processor import LOW_SIDE, SIZED_PIXELS, PilProcessor


class Mistral3Processor(PilProcessor):
    """Reads pictures of models with a Pixtral tower."""

    kinds = ("PixtralImageProcessor",)
    inputs = SIZED_PIXELS
    has_fixed_size = False

    def set_tokens(self) -> None:
        self.image_token = self.settings.get("image_token", "[IMG]")
        self.end_of_row = self.settings.get("image_break_token", "[IMG_BREAK]")
        self.end = self.settings.get("image_end_token", "[IMG_END]")
        self.placeholder = self.image_token
        self.merge_size = self.settings.get("spatial_merge_size", 1)
        # Pixels of a side that become an image token.
        self.side = self.settings.get("patch_size", 16) * self.merge_size

    def family_settings(self) -> dict[str, Any]:
        return {"patch_size": self.side}

    def low_options(self) -> dict[str, Any]:
        longest = self.high.size.longest_edge or LOW_SIDE
        return {"size": {"longest_edge": min(longest, LOW_SIDE)}}

    def process(self, image: Image.Image, detail: Detail) -> ProcessedImage:
        processed = super().process(image, detail)
        if processed.num_embeds == 1 < self.merge_size:  # transformers' tower fails
            return super().process(image.resize((2 * self.side, self.side)), detail)
        return processed

    def expand(self, outputs: Mapping[str, Any]) -> str:
        [(height, width)] = outputs["image_sizes"]
        row = self.image_token * (width // self.side)
        return self.end_of_row.join([row] * (height // self.side)) + self.end
