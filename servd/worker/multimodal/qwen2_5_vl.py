"""Qwen2.5-VL, and how Qwen's later models read pictures: of any size, in patches, some merged."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from servd.worker.multimodal._processor import LOW_SIDE, PIXELS, PilProcessor


class Qwen2_5_VLProcessor(PilProcessor):
    """Reads pictures of Qwen's models."""

    kinds = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor")
    inputs = PIXELS | {"image_grid_thw": np.int64}
    has_fixed_size = False

    def set_tokens(self) -> None:
        self.kind = self.kinds[0]  # the others are names of the same
        self.image_token = self.token("image_token", "<|image_pad|>")
        self.placeholder = self.image_token

    def low_options(self) -> dict[str, Any]:
        size = self.high.size  # pixels of the area
        longest = max(min(size.longest_edge, LOW_SIDE**2), size.shortest_edge)
        return {"size": {"shortest_edge": size.shortest_edge, "longest_edge": longest}}

    def grid(self, outputs: Mapping[str, Any]) -> tuple[int, int]:
        [(_, num_rows, num_columns)] = outputs["image_grid_thw"].tolist()
        return num_rows // self.high.merge_size, num_columns // self.high.merge_size

    def expand(self, outputs: Mapping[str, Any]) -> str:
        num_rows, num_columns = self.grid(outputs)
        return self.image_token * (num_rows * num_columns)
