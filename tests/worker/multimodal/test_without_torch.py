"""The image processors of real families in the process that has no torch."""

import base64
import os
import shutil

import msgspec
import numpy as np
import pytest

from servd.api.engine.media_loader import MediaLoader
from servd.api.text.prompt import Picture
from servd.base.errors import InvalidRequest
from servd.base.plugins import load_class
from servd.checkpoint.model_spec import read_spec
from servd.config import Config, MultiModalConfig
from servd.worker.multimodal import FAMILIES, ImageProcessor
from tests.image_processors import encode, photo


@pytest.mark.parametrize("family", ["idefics3", "llava_next", "qwen2_5_vl"])
async def test_tensors_are_those_of_a_process_with_torch(family, vision_checkpoint, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    folder = vision_checkpoint(family)
    image = photo(131, 77)
    url = f"data:image/png;base64,{base64.b64encode(encode(image, 'PNG')).decode()}"
    loader = MediaLoader(Config(), read_spec(folder))
    try:
        [loaded] = await loader.load([Picture(url)], None, "")
    finally:
        loader.close()
    processor = load_class(FAMILIES, family, ImageProcessor)(folder, {})
    expected = processor.process(image, "auto")
    assert loaded.placeholder == processor.placeholder
    assert (loaded.text, loaded.num_embeds) == (expected.text, expected.num_embeds)
    assert loaded.grid == expected.grid
    assert {place.name for place in loaded.tensors} == expected.tensors.keys()
    for place in loaded.tensors:
        tensor = expected.tensors[place.name]
        data = os.pread(loaded.memory.file, tensor.nbytes, place.offset)
        values = np.frombuffer(data, place.dtype).reshape(place.shape)
        assert (values == tensor).all()


async def test_options_that_the_processor_refuses_name_the_flag_in_the_log(
    vision_checkpoint, monkeypatch, capfd
):
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    options = MultiModalConfig(mm_processor_kwargs={"colour": 1})
    config = msgspec.structs.replace(Config(), multimodal=options)
    loader = MediaLoader(config, read_spec(vision_checkpoint("qwen2_5_vl")))
    url = f"data:;base64,{base64.b64encode(encode(photo(), 'PNG')).decode()}"
    try:
        with pytest.raises(InvalidRequest, match="not available with this model: see the .* log$"):
            await loader.load([Picture(url)], None, "")
        log = capfd.readouterr().err
    finally:
        loader.close()
    assert "--mm-processor-kwargs: 'colour' is unknown" in log
    assert "Traceback" not in log


async def test_a_file_that_asks_for_a_billion_tokens(vision_checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    folder = shutil.copytree(vision_checkpoint("smolvlm"), tmp_path / "large")
    (folder / "processor_config.json").write_text('{"image_seq_len": 1000000000}', "utf8")
    loader = MediaLoader(Config(), read_spec(folder))
    try:
        with pytest.raises(InvalidRequest, match="not available"):
            await loader.load([Picture("data:;base64,")], None, "")
    finally:
        loader.close()
