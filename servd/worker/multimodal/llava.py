"""LLaVA, whose tower reads squares or is Pixtral's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from servd.checkpoint.account import object_in
from servd.checkpoint.config_json import read_json
from servd.worker.multimodal import Detail, ImageProcessor, ProcessedImage
from servd.worker.multimodal._llava import SquareProcessor
from servd.worker.multimodal.mistral3 import Mistral3Processor


class LlavaProcessor(ImageProcessor):
    """Reads pictures of LLaVA."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        super().__init__(folder, options)
        vision = object_in(read_json(folder / "config.json"), "vision_config") or {}
        is_pixtral = vision.get("model_type") == "pixtral"
        self.processor = (Mistral3Processor if is_pixtral else SquareProcessor)(folder, options)
        self.placeholder = self.processor.placeholder

    def process(self, image: Image.Image, detail: Detail) -> ProcessedImage:
        return self.processor.process(image, detail)
