"""The process that decodes pictures."""

import io
import os
import re

import numpy as np
import pytest
from PIL import Image, ImageOps

from servd.base.errors import InvalidRequest
from servd.ipc.start_messages import MediaRequest
from servd.worker import media_process
from servd.worker.media_process import answer_request, decode
from tests.image_processors import PixelProcessor, encode, hostile_pictures, photo

HOSTILE = hostile_pictures()


def answer(data: bytes):
    """The reply to a picture, and the file with its tensors."""
    file = os.memfd_create("picture")
    os.write(file, data)
    processor = PixelProcessor(None, {})
    return answer_request(MediaRequest("auto"), file, processor), file


@pytest.mark.parametrize("name", HOSTILE)
def test_a_picture_that_is_not_one_is_refused_in_our_words(name):
    data, word = HOSTILE[name]
    reply, file = answer(data)
    os.close(file)
    assert reply.error is not None and re.search(word, reply.error)
    assert reply.tensors == []


@pytest.mark.parametrize("name", ["PNG", "WEBP"])
def test_tensors_are_in_the_file_instead_of_the_picture(name):
    image = photo(41, 29)
    options = {"lossless": True} if name == "WEBP" else {}
    reply, file = answer(encode(image, name, **options))
    assert reply.error is None and reply.text == "41x29 auto"
    assert reply.placeholder == "<image>"
    arrays = {}
    for place in reply.tensors:
        count = int(np.prod(place.shape))
        data = os.pread(file, 8 * count, place.offset)
        arrays[place.name] = np.frombuffer(data, place.dtype, count).reshape(place.shape)
        assert place.offset % 64 == 0
    os.close(file)
    assert arrays["size"].tolist() == [41, 29]
    assert (arrays["pixel_values"] == np.asarray(image)).all()


def test_tensors_that_are_too_large_are_an_error(monkeypatch):
    monkeypatch.setattr(media_process, "MAX_TENSORS", 1 << 20)
    reply, file = answer(encode(photo(640, 480), "PNG"))
    os.close(file)
    assert reply.error is not None and "memory" in reply.error


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_a_picture(orientation):
    image = photo()
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(image, "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert decode(data).size == ((30, 40) if orientation > 4 else (40, 30))
    assert decode(data).tobytes() == expected.convert("RGB").tobytes()


def test_content_decides_what_a_picture_is():
    image = photo()
    data = encode(image, "PNG") + b"PK\x03\x04 a zip follows <script>"
    assert decode(data).tobytes() == image.tobytes()
    gif = encode(image.convert("P"), "GIF") + b"<html><script>alert(1)</script>"
    assert decode(gif).tobytes() == image.convert("P").convert("RGB").tobytes()


def test_only_the_first_frame_counts():
    first = photo(seed=1).convert("P")
    second = photo(seed=2).convert("P")
    data = encode(first, "GIF", save_all=True, append_images=[second])
    assert decode(data).tobytes() == first.convert("RGB").tobytes()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1", "CMYK", "I;16"])
def test_modes_become_rgb_as_transformers_converts_them(mode):
    from transformers.image_transforms import convert_to_rgb

    if mode == "I;16":
        image = Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50)
    elif mode == "RGBA":
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 4), np.uint8))
    else:
        image = photo().convert(mode)
    options = {"transparency": 3} if mode == "P" else {}
    data = encode(image, "JPEG" if mode == "CMYK" else "PNG", **options)
    expected = convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)
    assert (np.asarray(decode(data)) == expected).all()


def test_a_picture_that_is_too_long_has_its_size_in_the_error():
    with pytest.raises(InvalidRequest, match="1000 x 4 pixels"):
        decode(encode(photo(1000, 4), "PNG"))
