"""Gemma 3: a picture becomes a square; with pan and scan, crops of a long picture follow it."""

from collections.abc import Mapping
from typing import Any

from servd.worker.multimodal._processor import PIXELS, PilProcessor


class Gemma3Processor(PilProcessor):
    """Reads pictures of Gemma 3."""

    kinds = ("Gemma3ImageProcessor",)
    inputs = PIXELS

    def set_tokens(self) -> None:
        self.placeholder = self.token("boi_token", "<start_of_image>")
        self.end = self.token("eoi_token", "<end_of_image>")
        self.image_token = self.token("image_token", "<image_soft_token>")

    def family_settings(self) -> dict[str, Any]:
        return {
            "do_pan_and_scan": False,
            "pan_and_scan_min_crop_size": 256,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        }

    def low_options(self) -> dict[str, Any]:
        return {"do_pan_and_scan": False}

    def expand(self, outputs: Mapping[str, Any]) -> str:
        tokens = self.image_token * self.settings.get("image_seq_length", 256)
        view = f"\n\n{self.placeholder}{tokens}{self.end}\n\n"
        [num_crops] = outputs["num_crops"].tolist()
        if num_crops == 0:
            return view
        crops = " ".join([view] * num_crops)
        return (
            f"Here is the original image {view} and here are some crops to help you see better "
            f"{crops}"
        )
