"""Writes tokenizer.json for a model that has only slow tokenizer files: `python -m
servd.worker.loading.convert_tokenizer`.

Runs in its own process because transformers imports torch, and the API process imports neither.
"""

import sys
from pathlib import Path


def convert(source: str, target: str, trust_remote_code: bool = False) -> None:
    """Load the tokenizer in folder `source` and save it with its tokenizer.json in folder `target`.
    Raises ValueError if transformers cannot convert it to a fast tokenizer.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        source, trust_remote_code=trust_remote_code, use_fast=True
    )
    tokenizer.save_pretrained(target)
    if not (Path(target) / "tokenizer.json").exists():
        raise ValueError(f"transformers has no fast form of {type(tokenizer).__name__}")


def main(arguments: list[str]) -> int:
    """Convert a tokenizer; returns the exit code, with the reason of a failure on stderr.
    `arguments`: source, target, and --trust-remote-code to run Python code of the source.
    """
    source, target, *flags = arguments
    try:
        convert(source, target, "--trust-remote-code" in flags)
    except Exception as error:  # a model's own code may raise anything
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
