"""`servd bench serve --dataset-name random-mm`: pictures that are valid, and differ or do not."""

import argparse
import asyncio
import base64
import io

import pytest
from PIL import Image

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from servd.bench import _data, _pictures, serve
from servd.checkpoint.model_spec import read_spec
from tests import vision_models
from tests.api import harness
from tests.api.test_vision import cache_counts

SIZES = "{(30, 45, 1): 0.5, (8, 8, 1): 0.5, (64, 64, 16): 0.0}"


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_options(parser)
    options = ["--dataset-name", "random-mm", "--num-prompts", "6", "--input-len", "9"]
    return parser.parse_args([*options, "--random-mm-bucket-config", SIZES, *flags])


def test_pictures_have_the_sizes_and_differ():
    flags = ["--random-mm-base-items-per-request", "4"]
    flags += ["--random-mm-num-mm-items-range-ratio", "0.5"]
    prompts = _data.make_prompts(arguments(*flags))
    assert {len(prompt.images) for prompt in prompts} <= {2, 3, 4, 5, 6}
    images = [image for prompt in prompts for image in prompt.images]
    assert len({*images}) == len(images)
    sizes = set()
    for image in images:
        file = io.BytesIO(base64.b64decode(image.removeprefix("data:image/png;base64,")))
        with Image.open(file) as picture:
            picture.load()
            assert picture.mode == "RGB"
            sizes.add(picture.size)
    assert sizes == {(45, 30), (8, 8)}
    same = _data.make_prompts(arguments(*flags, "--random-mm-same"))
    assert len({tuple(prompt.images) for prompt in same}) == 1
    assert len({tuple(prompt.prompt) for prompt in same}) == 6


@pytest.mark.parametrize("text", ["", "{", "{(1, 2): 1}", "{(9, 9, 2): 1}", "[]", "{(0, 9, 1): 1}"])
def test_wrong_sizes_are_named(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="expected sizes"):
        _pictures.parse_sizes(text)


@pytest.mark.parametrize(("flags", "num_hits"), [([], 0), (["--random-mm-same"], 6)])
async def test_a_model_reads_them(tmp_path, flags: list[str], num_hits: int):
    vision_models.make("smolvlm", tmp_path)
    async with harness.serve(spec=read_spec(tmp_path)) as served:
        async with harness.listening(served.app) as url:
            options = arguments("--url", url, "--output-len", "2", *flags)
            assert await asyncio.to_thread(serve.run, options) == 0
        counts = await cache_counts(served)
    assert counts == [7, num_hits]  # with the warm-up
