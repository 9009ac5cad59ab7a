"""Idefics 3: a picture is cut into tiles, and a small version of the whole follows them."""

from collections.abc import Mapping
from typing import Any

from servd.worker.multimodal._processor import PIXELS, PilProcessor


class Idefics3Processor(PilProcessor):
    """Reads pictures of Idefics 3."""

    kinds = ("Idefics3ImageProcessor",)
    inputs = PIXELS  # nothing of one picture is masked
    has_parts = True  # tiles

    def set_tokens(self) -> None:
        self.image_token = "<image>"
        self.border = "<fake_token_around_image>"
        self.whole = "<global-img>"
        self.placeholder = self.image_token

    def family_settings(self) -> dict[str, Any]:
        return {"return_row_col_info": True}

    def low_options(self) -> dict[str, Any]:
        return {"do_image_splitting": False}

    def expand(self, outputs: Mapping[str, Any]) -> str:
        [[num_rows]] = outputs["rows"]
        [[num_columns]] = outputs["cols"]
        tokens = self.image_token * self.settings.get("image_seq_len", 169)
        text = ""
        for row in range(1, num_rows + 1):
            for column in range(1, num_columns + 1):
                text += f"{self.border}<row_{row}_col_{column}>{tokens}"
            text += "\n"
        if text:
            text += "\n"
        return f"{text}{self.border}{self.whole}{tokens}{self.border}"
