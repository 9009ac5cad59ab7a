"""The tokenizer of a GGUF file, as tokenizer.json."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servd.base.errors import ModelNotFound
from servd.checkpoint import gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CUTS: dict[str, list[str]] = gguf.TABLE["cuts"]
ALIASES: dict[str, str] = gguf.TABLE["aliases"]
# tokenizer.ggml.token_type
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's
MAX_PIECE = 256  # characters
MAX_MERGES = 1 << 20  # Gemma has 580,000


def write_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json into a folder that `gguf.as_folder` made; return its path. Raises
    ModelNotFound if the tokenizer is of an unknown kind or damaged.
    """
    _, values = gguf.open_file(folder / gguf.WEIGHTS)
    model = values.get("tokenizer.ggml.model")
    pre = str(values.get("tokenizer.ggml.pre", "default"))
    if model != "llama" and (model != "gpt2" or ALIASES.get(pre, pre) not in CUTS):
        raise ModelNotFound(
            f"{(folder / gguf.WEIGHTS).resolve()} has a tokenizer {model!r} with pre-tokenizer "
            f"{pre!r}; supported are llama, and gpt2 with {', '.join([*CUTS, *ALIASES])}: set "
            "--tokenizer to the original model's folder"
        )
    try:
        content = make_tokenizer(values, pre)
    except Exception as error:  # what tokenizers raises has no class of its own
        raise ModelNotFound(f"{folder}: its tokenizer is incomplete or wrong: {error!r}") from None
    file = folder / "tokenizer.json"
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf8") as scratch:
        scratch.write(content)
    os.replace(scratch.name, file)
    return file


def make_tokenizer(values: dict[str, Any], pre: str) -> str:
    """Return tokenizer.json of a tokenizer "llama" (SentencePiece's BPE) or "gpt2" (of bytes)."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    metadata = {name.removeprefix("tokenizer.ggml."): value for name, value in values.items()}
    tokens = metadata["tokens"]
    types = metadata.setdefault("token_type", [NORMAL] * len(tokens))
    form = gguf.ARCHITECTURES.get(str(values.get("general.architecture")), {})
    adds_bos = pre in gguf.TABLE["like_llama3"] or metadata["model"] == "llama"
    kept = set(tokens)  # tokens that keep the spaces after them
    if metadata["model"] == "llama":
        made = _make_sentence_piece(metadata, form.get("merges_in_order", False))
        kept = set(form.get("unstripped", tokens))
    else:
        made = _make_byte_level(metadata, pre)
    begin = [metadata["bos_token_id"]] if metadata.get("add_bos_token", adds_bos) else []
    end = [metadata["eos_token_id"]] if metadata.get("add_eos_token") else []
    if begin or end:
        first, last = ([tokens[token_id] for token_id in ids] for ids in (begin, end))
        made.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, "$B:1", *last],
            special_tokens=[(tokens[token_id], token_id) for token_id in {*begin, *end}],
        )
    for kind, add in ((CONTROL, made.add_special_tokens), (USER_DEFINED, made.add_tokens)):
        add(
            [
                AddedToken(
                    token, special=kind == CONTROL, normalized=False, rstrip=token not in kept
                )
                for token, token_type in zip(tokens, types, strict=True)
                if token_type == kind and made.token_to_id(token) is not None
            ]
        )
    return made.to_str()


def _make_byte_level(metadata: dict[str, Any], pre: str) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    vocab = {token: token_id for token_id, token in enumerate(metadata["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["merges"]]
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in gguf.TABLE["like_llama3"]))
    name = ALIASES.get(pre, pre)
    if name == "qwen2":
        made.normalizer = normalizers.NFC()
    cuts = [Split(Regex(cut), "isolated") for cut in CUTS[name]]
    made.pre_tokenizer = Sequence([*cuts, ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    return made


def _make_sentence_piece(metadata: dict[str, Any], in_order: bool) -> Tokenizer:
    """Return a BPE tokenizer that merges two pieces into any third, the one of the highest score
    first; with `in_order`, the first of the vocabulary first.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    # Gemma's runs of spaces.
    tokens = [token if token.strip(" ") else SPACE * len(token) for token in metadata["tokens"]]
    scores = range(0, -len(tokens), -1) if in_order else metadata["scores"]
    typed = zip(tokens, scores, metadata["token_type"], strict=True)
    pieces = {token: score for token, score, kind in typed if kind in (NORMAL, USER_DEFINED)}
    merges: list[tuple[str, str]] = []
    for token in pieces:
        if len(token) > MAX_PIECE or len(merges) > MAX_MERGES:
            raise ValueError(f"{len(merges)} merges, or a piece of {len(token)} characters")
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges += [(head, tail) for head, tail in cuts if head in pieces and tail in pieces]
    merges.sort(key=lambda pair: (-pieces[pair[0] + pair[1]], -len(pair[0])))
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = tokens[metadata["unknown_token_id"]] if "unknown_token_id" in metadata else None
    made = Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    made.normalizer = normalizers.Sequence(spaces)
    made.decoder = decoders.Sequence(steps)
    return made
