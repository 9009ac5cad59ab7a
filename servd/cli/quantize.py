"""Write a checkpoint of 4 or 8 bits."""

import argparse
from pathlib import Path

from tqdm import tqdm

from servd.api.text.tokenizer import Tokenizer
from servd.base import plugins
from servd.base.errors import ConfigError
from servd.base.sizes import format_bytes
from servd.checkpoint import hub, model_spec

BITS = {"int4": 4, "int8": 8}
ROW = 512  # tokens that are computed together, if the model can


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder or the name of a model on the hub")
    parser.add_argument("--to", choices=BITS, required=True, help="type of the matrices")
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="text like that of requests: it decides which errors matter [round each number alone]",
    )
    parser.add_argument("--output", metavar="DIR", help="folder that is made [MODEL-TYPE]")
    parser.add_argument(
        "--group-size",
        type=int,
        default=32,
        metavar="N",
        help="numbers of a row that share a scale [32]",
    )
    parser.add_argument(
        "--tokens", type=int, default=32768, metavar="N", help="to read of the text [32768]"
    )


def run(arguments: argparse.Namespace) -> int:
    output = Path(arguments.output or f"{Path(arguments.model).name}-{arguments.to}")
    if output.exists():
        raise ConfigError(f"{output} exists already: name another folder with --output")
    if arguments.group_size < 1:
        raise ConfigError(f"--group-size {arguments.group_size}: must be at least 1")
    bits = BITS[arguments.to]
    folder = hub.download_weights(arguments.model)
    rows: list[list[int]] = []
    if arguments.calibrate is not None:
        rows = read_rows(folder, arguments.calibrate, arguments.tokens)
    held_out = max(len(rows) // 8, 1)
    quantize = plugins.load("servd.worker", "calibration", "quantize")
    with tqdm(
        total=1.0, desc="quantize", bar_format="{l_bar}{bar}| {elapsed}", disable=None
    ) as bar:
        result = quantize(
            folder,
            output,
            bits,
            arguments.group_size,
            rows[held_out:],
            rows[:held_out],
            lambda done: bar.update(done - bar.n),
        )
    if rows:
        quality = (
            f"perplexity on {held_out * len(rows[0])} tokens of the text that were left out: "
            f"{result.before:.3f} before, {result.after:.3f} after "
            f"({result.after / result.before:.3f}x)"
        )
    else:
        quality = "rounded without a text; --calibrate FILE loses less: docs/how-to/quantization.md"
    print(
        f"{result.num_matrices} matrices, {result.share:.0%} of the weights, are {arguments.to}: "
        f"{bits + 16 / arguments.group_size:.3f} bits each\n{quality}\n"
        f"{output}: {format_bytes(result.num_bytes)}; servd serve {output}"
    )
    return 0


def read_rows(folder: Path, file: str, num_tokens: int) -> list[list[int]]:
    """Return tokens of a text in rows of equal length. Raises ConfigError if the file cannot be
    read, or is too short.
    """
    try:
        text = Path(file).read_text(encoding="utf8")
    except OSError as error:
        raise ConfigError(f"--calibrate {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--calibrate {file}: this is not UTF-8 text") from None
    size = min(ROW, model_spec.read_spec(folder).max_position_embeddings)
    if num_tokens < 2 * size:
        raise ConfigError(f"--tokens {num_tokens} is too few: {2 * size} at least")
    ids = Tokenizer.load(str(folder)).encode(text, add_special_tokens=False)[:num_tokens]
    rows = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    if len(rows) < 2:
        raise ConfigError(
            f"--calibrate {file}: {len(ids)} tokens are too few: {2 * size} at least, and 16384 or "
            "more for a good result"
        )
    return rows
