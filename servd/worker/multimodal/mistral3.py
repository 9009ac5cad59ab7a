"""Mistral 3: a Pixtral tower, of which it merges patches."""

from PIL import Image

from servd.worker.multimodal import Detail, ProcessedImage
from servd.worker.multimodal._pixtral import PixtralProcessor


class Mistral3Processor(PixtralProcessor):
    """Reads pictures of Mistral 3."""

    def process(self, image: Image.Image, detail: Detail) -> ProcessedImage:
        processed = super().process(image, detail)
        if processed.num_embeds > 1:
            return processed
        # transformers' tower fails at a picture of one token.
        return super().process(image.resize((2 * self.token_side, self.token_side)), detail)
