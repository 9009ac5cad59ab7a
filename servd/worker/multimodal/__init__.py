"""Families of models that see, one file for each: how a picture becomes tensors and text, and
the vision tower that encodes the tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

FAMILIES = __name__  # the package, for servd.base.plugins

Detail = Literal["auto", "low", "high"]
LARGEST_SIDE = 4096  # pixels; the processors of all families make larger pictures smaller


@dataclass(frozen=True)
class ProcessedImage:
    """A picture in the form that a model reads."""

    text: str  # stands in the prompt in place of `ImageProcessor.placeholder`
    num_embeds: int  # image tokens in `text`
    grid: tuple[int, int]  # see MultiModalFeature
    tensors: Mapping[str, np.ndarray]  # arguments of the tower; float32 or int64
    # Parts of the picture, of equally many image tokens, that the tower encodes each by itself: the
    # second dimension of its tensors. A step need not encode all of them.
    num_parts: int = 1


class ImageProcessor(ABC):
    """A checkpoint's image processor. `options`: --mm-processor-kwargs."""

    placeholder: str  # what the chat template writes for a picture

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self.folder = folder
        self.options = options

    @abstractmethod
    def process(self, image: Image.Image, detail: Detail) -> ProcessedImage:
        """Return the tensors and the text of an RGB picture."""

    def process_largest(self, max_embeds: int) -> Mapping[str, np.ndarray]:
        """Return the tensors of a large picture, or of its first part, with at most `max_embeds`
        image tokens.
        """
        side = LARGEST_SIDE
        processed = self.process(Image.new("RGB", (side, side)), "high")
        while processed.num_embeds > max_embeds * processed.num_parts and side > 1:
            side //= 2
            processed = self.process(Image.new("RGB", (side, side)), "high")
        if processed.num_parts == 1:
            return processed.tensors
        return {name: tensor[:, :1] for name, tensor in processed.tensors.items()}
