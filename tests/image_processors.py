"""Stand-ins for a model's image processor, and pictures that are no good."""

import io
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from servd.worker.multimodal import Detail, ImageProcessor, ProcessedImage

# What a process that decodes pictures has no reason to do. Events of `sys.audit`.
FORBIDDEN = ("socket.", "subprocess.", "os.exec", "os.posix_spawn", "os.fork", "os.system", "open")


class PixelProcessor(ImageProcessor):
    """Returns the pixels of a picture, and its size as text."""

    placeholder = "<image>"

    def process(self, image: Image.Image, detail: Detail) -> ProcessedImage:
        assert image.mode == "RGB"
        pixels = np.asarray(image, dtype=np.float32)
        size = np.array(image.size)
        text = f"{image.width}x{image.height} {detail}"
        return ProcessedImage(text, 1, (1, 1), {"size": size, "pixel_values": pixels})


class WatchedProcessor(PixelProcessor):
    """Its text has what the process has done since it began to read clients' pictures."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        super().__init__(folder, options)
        self.events: list[str] = []
        self.num_pictures = 0
        self.tried: list[str] = []
        sys.addaudithook(self.watch)

    def watch(self, event: str, args: tuple[object, ...]) -> None:
        if event.startswith(FORBIDDEN) and event not in ("socket.__new__",):
            self.events.append(f"{event} {args}")

    def process(self, image: Image.Image, detail: Detail) -> ProcessedImage:
        self.num_pictures += 1
        if self.num_pictures == 5:  # after the server's own
            self.events.clear()
        if detail == "high":  # what a picture that took over the process would try
            for attempt in (
                lambda: socket.socket(),
                lambda: open(__file__),
                lambda: subprocess.run(["true"]),
            ):
                self.tried.append(_try(attempt))
        if detail == "low":
            while True:
                pass
        torch = sys.modules["torch"]
        text = repr([self.events, self.tried, torch])
        return ProcessedImage(text, 1, (1, 1), {"size": np.array(image.size)})


def _try(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return str(error.errno)
    return "it worked"


def png(width: int, height: int, **chunks: bytes) -> bytes:
    """A PNG of black pixels, 1 bit each, whose data ends after the first of many."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    body = zlib.compress(bytes(1 << 16))
    extra = b"".join(chunk(name.encode(), data) for name, data in chunks.items())
    parts = (chunk(b"IHDR", header), extra, chunk(b"IDAT", body), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def encode(image: Image.Image, name: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def photo(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """A picture without a symmetry."""
    numbers = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(numbers)


def large_webp() -> bytes:
    """A WebP whose canvas has 16,384 x 16,384 pixels, with a small frame."""
    small = encode(photo(), "WEBP")[12:]
    extended = b"VP8X" + struct.pack("<IBBBB", 10, 0, 0, 0, 0) + 2 * b"\xff\x3f\x00"
    return b"RIFF" + struct.pack("<I", 4 + len(extended + small)) + b"WEBP" + extended + small


def hostile_pictures() -> dict[str, tuple[bytes, str]]:
    """Pictures that are refused: bytes, and a word of the reason."""
    jpeg = encode(photo(), "JPEG")
    gif = encode(photo(), "GIF")
    lossless = encode(photo(), "PNG")
    large_gif = gif[:6] + b"\xff\xff\xff\xff" + gif[10:]
    broken_exif = encode(photo(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(40))
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"
    other = {name: encode(photo(), name) for name in ("BMP", "TIFF", "PPM", "ICO", "TGA", "PDF")}
    return {
        "PNG bomb": (png(50_000, 50_000), "megapixels"),
        "PNG bomb, below the limit": (png(8_000, 8_000), "truncated"),
        "GIF bomb": (large_gif, "megapixels"),
        "WebP bomb": (large_webp(), "megapixels|truncated"),
        "text bomb": (png(9, 9, zTXt=b"a\0\0" + zlib.compress(bytes(90 << 20))), "truncated"),
        "long": (png(1, 100_000), "one side"),
        "wide": (png(100_000, 1), "one side"),
        "truncated JPEG": (jpeg[:-100], "truncated"),
        "truncated PNG": (lossless[:-100], "truncated"),
        "truncated GIF": (gif[:-100], "truncated"),
        "truncated WebP": (encode(photo(), "WEBP")[:-50], "JPEG|truncated"),
        "header alone": (jpeg[:20], "JPEG|truncated"),
        "empty": (b"", "JPEG"),
        "noise": (np.random.default_rng(0).bytes(5000), "JPEG"),
        "JPEG of noise": (jpeg[:3] + np.random.default_rng(0).bytes(5000), "JPEG|truncated"),
        "EXIF": (broken_exif, "truncated"),
        "SVG": (svg, "JPEG"),
        "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", "JPEG"),
        "XPM": (b'/* XPM */\nstatic char * a[] = {"1 1 1 1", "a c None", "a"};', "JPEG"),
        **{name: (data, "JPEG") for name, data in other.items()},
    }
