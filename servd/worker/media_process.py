"""The process that decodes pictures, which clients sent: it has no socket but its channel.

It runs without torch, which takes four times the memory of the rest, and as long to import.
"""

import contextlib
import io
import logging
import os
import resource
import socket
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from servd.base import log
from servd.base.errors import ConfigError, InvalidRequest
from servd.base.plugins import load_class
from servd.base.tracing import now_ns
from servd.checkpoint.multimodal_config import MultiModalSpec
from servd.ipc.child import limit_memory, read_start
from servd.ipc.start_messages import MediaReply, MediaRequest, Reply, StartLimitedProcess
from servd.messages.multimodal import TensorPlace
from servd.worker.multimodal import FAMILIES, ImageProcessor

logger = logging.getLogger("servd.media")

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
MAX_PIXELS = 64 << 20  # of a picture: 4 bytes each, in about 4 copies
MAX_RATIO = 200  # of the sides
MAX_TENSORS = 1 << 30  # bytes, of a picture
ALIGNMENT = 64  # bytes; see TensorPlace


def main() -> None:
    """Run the process: answer each MediaRequest with a MediaReply."""
    start = read_start(StartLimitedProcess)
    log.setup("media", start.config.observability)
    channel = socket.socket(fileno=start.channel)
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]; its import then fails

    def answer(reply: Reply) -> None:
        channel.sendall(msgspec.json.encode(reply) + b"\n")

    # A broken channel means that the API server has ended.
    with contextlib.suppress(ConnectionError):
        limit_memory(start.memory_limit)  # a processor's file may ask for any size
        try:
            processor = load_processor(start)
        except Exception as error:  # of transformers: any
            # Clients do not learn the reason, which names folders.
            logger.error(
                "pictures are not available: %r", error, exc_info=not isinstance(error, ConfigError)
            )
            log.flush()  # the API server ends this process when it has the answer
            answer(Reply("pictures are not available with this model: see the server's log"))
            return
        lock_up(start.memory_limit)
        answer(Reply())
        while True:
            line, files, _, _ = socket.recv_fds(channel, 1024, 1)
            if not line:
                return
            request = msgspec.json.decode(line, type=MediaRequest)
            reply = answer_request(request, files[0], processor)
            os.close(files[0])
            answer(reply)


def load_processor(start: StartLimitedProcess) -> ImageProcessor:
    """Return the processor of the checkpoint, after a picture of each format: what decoders import
    late cannot be opened later. Raises ConfigError and what libraries raise.
    """
    assert isinstance(start.spec.multimodal, MultiModalSpec)
    processor_class = load_class(FAMILIES, start.spec.multimodal.processor, ImageProcessor)
    options = start.config.multimodal.mm_processor_kwargs
    processor: ImageProcessor = processor_class(Path(start.spec.folder), options)
    Image.init()
    for name in FORMATS:
        file = io.BytesIO()
        Image.new("RGB", (64, 48)).save(file, name)
        processor.process(decode(file.getvalue()), "auto")
    return processor


def lock_up(memory_limit: int) -> None:
    """Limit the bytes that this process may allocate in addition, and let it open nothing beside
    the file of a request: no other file, and no socket.
    """
    limit_memory(memory_limit)
    next_file = os.dup(0)
    os.close(next_file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_file + 1, next_file + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would have clients' pictures


def answer_request(request: MediaRequest, file: int, processor: ImageProcessor) -> MediaReply:
    """Replace the picture in a file by its tensors. What is wrong with it is said in servd's words:
    those of a decoder may quote the picture or name a path.
    """
    start = now_ns()
    try:
        image = decode(os.pread(file, os.fstat(file).st_size, 0))
        decoded = now_ns()
        processed = processor.process(image, request.detail)
        tensors = write_tensors(file, processed.tensors)
    except InvalidRequest as error:
        return MediaReply(str(error))
    except UnidentifiedImageError:
        return MediaReply("it is not a JPEG, PNG, WebP or GIF picture")
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        return MediaReply(f"it has more than {MAX_PIXELS >> 20} megapixels")
    except MemoryError:
        return MediaReply("it takes too much memory: send a smaller one")
    except Exception as error:  # decoders get any bytes, and raise any
        logger.info("a picture was not read: %s", type(error).__name__)
        return MediaReply("it is damaged, truncated or of an unusual kind")
    return MediaReply(
        placeholder=processor.placeholder,
        text=processed.text,
        num_embeds=processed.num_embeds,
        grid=processed.grid,
        tensors=tensors,
        num_parts=processed.num_parts,
        decode_ns=decoded - start,
        process_ns=now_ns() - decoded,
    )


def decode(data: bytes) -> Image.Image:
    """Return the first frame of a picture as RGB, turned upright, over white where it is
    transparent. Raises InvalidRequest, and what Pillow raises.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Image.MAX_IMAGE_PIXELS = MAX_PIXELS
        image = Image.open(io.BytesIO(data), formats=FORMATS)  # reads only its header
        short, long = sorted(image.size)
        if long > MAX_RATIO * short:
            raise InvalidRequest(
                f"it has {image.width} x {image.height} pixels: one side may be {MAX_RATIO} times "
                "as long as the other"
            )
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")


def write_tensors(file: int, tensors: Mapping[str, np.ndarray]) -> list[TensorPlace]:
    """Write tensors into a file, in place of what it has. Raise MemoryError if they are large."""
    os.ftruncate(file, 0)
    places: list[TensorPlace] = []
    offset = 0
    for name, tensor in tensors.items():
        if offset + tensor.nbytes > MAX_TENSORS:
            raise MemoryError
        dtype = "float32" if tensor.dtype == np.float32 else "int64"
        places.append(TensorPlace(name, dtype, list(tensor.shape), offset))
        tensor = np.ascontiguousarray(tensor, dtype)
        os.pwrite(file, tensor.data, offset)
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places


if __name__ == "__main__":
    main()
