"""Random pictures for measurements, as PNG files that need no library."""

import argparse
import ast
import base64
import random
import struct
import zlib

NAME = "random-mm"
BLOCK = 8  # pixels a side of a colour: files are about as large as those of photographs
Sizes = dict[tuple[int, int], float]  # height and width -> probability


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags for pictures."""
    add = parser.add_argument_group(f"pictures of --dataset-name {NAME}").add_argument
    help = "pictures of a request [%(default)s]"
    add("--random-mm-base-items-per-request", type=int, default=1, metavar="N", help=help)
    help = "this number varies evenly by this share [%(default)s]"
    flag = "--random-mm-num-mm-items-range-ratio"
    add(flag, type=float, default=0.0, metavar="X", help=help)
    help = "probabilities of heights and widths [{(448, 448, 1): 1}]"
    default: Sizes = {(448, 448): 1.0}
    flag = "--random-mm-bucket-config"
    add(flag, type=parse_sizes, default=default, metavar="SIZES", help=help)
    add("--random-mm-same", action="store_true", help="all requests have the same pictures")


def parse_sizes(text: str) -> Sizes:
    """Return the sizes in vLLM's form, `{(HEIGHT, WIDTH, 1): PROBABILITY}`. A third number above 1
    would be of a video's frames. Raises ArgumentTypeError.
    """
    try:
        sizes = {
            (int(height), int(width)): float(chance)
            for (height, width, num_frames), chance in ast.literal_eval(text).items()
            if num_frames == 1 and height > 0 and width > 0 and chance > 0
        }
    except (ValueError, TypeError, SyntaxError, AttributeError):
        sizes = {}
    if not sizes:
        raise argparse.ArgumentTypeError(f"{text}: expected sizes like {{(720, 1280, 1): 1.0}}")
    return sizes


def make_images(arguments: argparse.Namespace, rng: random.Random) -> list[str]:
    """Return the pictures of a request, as data: addresses."""
    mean = arguments.random_mm_base_items_per_request
    spread = int(mean * arguments.random_mm_num_mm_items_range_ratio)
    sizes: Sizes = arguments.random_mm_bucket_config
    count = mean + rng.randint(-spread, spread)
    chosen = rng.choices([*sizes], [*sizes.values()], k=count)
    pictures = (base64.b64encode(make_png(rng, *size)).decode() for size in chosen)
    return [f"data:image/png;base64,{picture}" for picture in pictures]


def make_png(rng: random.Random, height: int, width: int) -> bytes:
    """Return a PNG file of random blocks."""
    rows: list[bytes] = []
    for _ in range(0, height, BLOCK):
        colours = [rng.randbytes(3) * BLOCK for _ in range(0, width, BLOCK)]
        row = b"\0" + b"".join(colours)[: 3 * width]  # a zero: no filter
        rows += [row] * BLOCK
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    data = zlib.compress(b"".join(rows[:height]))
    chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", data), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
