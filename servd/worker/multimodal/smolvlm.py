"""SmolVLM: Idefics 3, with special tokens of its own."""

from servd.worker.multimodal.idefics3 import Idefics3Processor


class SmolVLMProcessor(Idefics3Processor):
    """Reads pictures of SmolVLM."""

    kinds = ("SmolVLMImageProcessor", "Idefics3ImageProcessor")

    def set_tokens(self) -> None:
        super().set_tokens()
        self.image_token = self.token("image_token", self.image_token)
        self.border = self.token("fake_image_token", self.border)
        self.whole = self.token("global_image_token", self.whole)
        self.placeholder = self.image_token
