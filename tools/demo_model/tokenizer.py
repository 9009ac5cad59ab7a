"""The demo model's tokenizer: byte-level BPE in which each digit is a token, and the chat
template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
MARKS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
# Contractions, words and punctuation with the space before them, single digits, line ends, other
# spaces.
SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|\s"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of `vocab_size` tokens: the special ones, the marks, 256 bytes and merges learned
    from `texts`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, START, END, *MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The marks keep their ids but are shown when tokens are turned into text: parsers look for
    # them.
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    return tokenizer


class Renderer:
    """Turns examples of the corpus into text, as a server does with the chat template."""

    def __init__(self) -> None:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self.template = environment.from_string(TEMPLATE.read_text(encoding="utf8"))

    def __call__(self, example: dict[str, Any]) -> str:
        """The text of an example, special tokens written out."""
        if "text" in example:
            return example["text"] + END_OF_TEXT
        return self.template.render(messages=example["messages"], tools=example["tools"])


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [START],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": TEMPLATE.read_text(encoding="utf8"),
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf8"
    )
