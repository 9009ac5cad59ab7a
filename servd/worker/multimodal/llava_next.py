"""LLaVA-NeXT: a picture as a square, then as tiles of the resolution that fits it best."""

from collections.abc import Mapping
from typing import Any

from servd.worker.multimodal._processor import SIZED_PIXELS
from servd.worker.multimodal.llava import LlavaProcessor


class LlavaNextProcessor(LlavaProcessor):
    """Reads pictures of LLaVA-NeXT."""

    kinds = ("LlavaNextImageProcessor",)
    inputs = SIZED_PIXELS

    def expand(self, outputs: Mapping[str, Any]) -> str:
        from transformers.image_processing_utils import select_best_resolution

        [(height, width)] = outputs["image_sizes"].tolist()
        resolution = select_best_resolution((height, width), self.high.image_grid_pinpoints)
        tile_sides = outputs["pixel_values"].shape[-2:]
        rows, columns = (
            side // tile_side * (tile_side // self.patch_size)
            for side, tile_side in zip(resolution, tile_sides, strict=True)
        )
        # The picture is in the middle of the tiles; what surrounds it has no tokens.
        scale = min(rows / height, columns / width)
        rows -= (rows - int(round(height * scale, 7))) // 2 * 2
        columns -= (columns - int(round(width * scale, 7))) // 2 * 2
        num_tiled = rows * (columns + 1)  # a token ends each row
        return self.image_token * (self.num_square_tokens(outputs) + num_tiled)
