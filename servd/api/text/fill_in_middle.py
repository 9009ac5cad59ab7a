"""FillInMiddle: builds the prompt that makes a code model write the text between two texts."""

import re
from typing import Self

from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import ConfigError

# By model family. `choose` takes the first template whose words are all tokens of the model.
TEMPLATES = (
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",  # Qwen 2.5 Coder, CodeGemma
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",  # StarCoder, Granite
    "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",  # SantaCoder
    "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",  # DeepSeek Coder
    "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>",  # Code Llama
    "[SUFFIX]{suffix}[PREFIX]{prefix}",  # Codestral
)
# Tokens that end the middle, even if the model does not list them as end of sequence.
ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|repo_name|>",
    "<|file_separator|>",
    "<file_sep>",
    "<fim_pad>",
    "▁<EOT>",
)
SLOT = re.compile(r"\{(prefix|suffix)\}")


class FillInMiddle:
    """A model's template. Raises ConfigError unless it has `{prefix}` and `{suffix}` once each."""

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self._pieces = SLOT.split(template)  # text and the names of slots in turn
        if sorted(self._pieces[1::2]) != ["prefix", "suffix"]:
            raise ConfigError(
                f"--fim-template must have {{prefix}} and {{suffix}} once each, got "
                f"{template[:200]!r}"
            )
        self.end_token_ids = [i for end in ENDS if (i := tokenizer.token_id(end)) is not None]

    @classmethod
    def choose(cls, tokenizer: Tokenizer, override: str | None = None) -> Self | None:
        """Return the template of `override` (--fim-template), or else the first known template
        whose special tokens the model has. None if no template fits.
        """
        if override is not None:
            return cls(override, tokenizer)
        for template in TEMPLATES:
            if all(
                tokenizer.token_id(word) is not None for word in SLOT.split(template)[::2] if word
            ):
                return cls(template, tokenizer)
        return None

    def prompt(self, prefix: str, suffix: str) -> str:
        """Return the prompt after which the model writes the text in the middle."""
        texts = {"prefix": prefix, "suffix": suffix}
        return "".join(texts[piece] if i % 2 else piece for i, piece in enumerate(self._pieces))
