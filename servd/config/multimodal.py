"""The options of pictures in prompts."""

from typing import Annotated, Any

from msgspec import Meta

from servd.config._section import Positive, Section

# A host, or a domain with all hosts below it.
DOMAIN = r"^(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\Z"


class MultiModalConfig(Section, frozen=True):
    """Pictures in prompts, for models that see."""

    language_model_only: bool = False
    """Load only the language model of a model that sees, and refuse pictures."""
    limit_mm_per_prompt: dict[str, Annotated[int, Meta(ge=0, le=1024)]] = {}
    """Most pictures in a prompt, as JSON: `{"image": 4}`. Default: 64."""
    mm_processor_kwargs: dict[str, Any] = {}
    """Options of the model's image processor, as JSON: `{"max_pixels": 501760}`."""
    allowed_media_domains: list[Annotated[str, Meta(pattern=DOMAIN)]] = []
    """Hosts from which the server may fetch pictures over https: `images.example.com`, or
    `*.example.com` for all hosts of a domain. Default: none.
    """
    allowed_local_media_path: str | None = None
    """Folder whose pictures requests may name by `file:` addresses. Default: none."""
    mm_processor_cache_gb: Annotated[float, Meta(ge=0, le=1024)] = 1.0
    """GiB of memory in which each API server keeps processed pictures for later requests."""
    encoder_cache_memory: Positive | None = None
    """Memory for encoded pictures, in bytes or as "2GiB". Equal pictures are encoded once. Default:
    for as many image tokens as fit in a prompt, at most 32768.
    """

    @property
    def max_images(self) -> int:
        """The most pictures in a prompt."""
        return self.limit_mm_per_prompt.get("image", 64)

    def encoder_cache_size(self, max_model_len: int, embed_bytes: int) -> int:
        """Return the image tokens in the memory for encoded pictures; `embed_bytes`: of one."""
        if self.encoder_cache_memory is None:
            return min(max_model_len, 32768)
        return max(self.encoder_cache_memory // embed_bytes, 1)
