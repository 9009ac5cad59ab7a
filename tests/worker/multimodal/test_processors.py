"""A picture's text and tensors are those of the checkpoint's own processor in transformers."""

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from servd.base import plugins
from servd.base.errors import ConfigError, InvalidRequest, UnsupportedModel
from servd.checkpoint.model_spec import read_spec
from servd.checkpoint.multimodal_config import MultiModalSpec
from servd.worker.multimodal import FAMILIES as PACKAGE
from servd.worker.multimodal import ImageProcessor
from tests.vision_models import FAMILIES, models

SIZES = [(1, 1), (37, 121), (300, 450), (64, 64), (1, 100), (100, 1), (700, 130)]
# Processors that transformers makes without torchvision and num2words.
WHOLE = {
    "idefics3": transformers.Idefics3Processor,
    "llava": transformers.LlavaProcessor,
    "llava_siglip": transformers.LlavaProcessor,
    "llava_next": transformers.LlavaNextProcessor,
    "gemma3": transformers.Gemma3Processor,
}


def picture(size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(size).integers(0, 256, (*reversed(size), 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def processor_name(folder: Path) -> str:
    spec = read_spec(folder).multimodal
    assert isinstance(spec, MultiModalSpec)
    return spec.processor


def processor_of(folder: Path, **options: Any) -> ImageProcessor:
    family = plugins.load_class(PACKAGE, processor_name(folder), ImageProcessor)
    return family(folder, options)


def pixtral_processor() -> Any:
    """Return transformers' class, whose module wants torchvision for a function that the module of
    the other image processor has, too.
    """
    package = "transformers.models.pixtral"
    pil = importlib.import_module(f"{package}.image_processing_pil_pixtral")
    sys.modules.setdefault(f"{package}.image_processing_pixtral", pil)
    return importlib.import_module(f"{package}.processing_pixtral").PixtralProcessor


class Reference:
    """The checkpoint's processor in transformers, with the image processor that needs Pillow."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.image_processor = transformers.AutoImageProcessor.from_pretrained(
            folder, backend="pil"
        )
        self.settings = json.loads((folder / "processor_config.json").read_text(encoding="utf8"))
        self.settings.pop("image_processor", None)
        self.settings.pop("processor_class")

    def run(
        self, placeholder: str, image: Image.Image, options: Mapping[str, Any]
    ) -> tuple[list[int], dict[str, np.ndarray]]:
        """Return the tokens for a picture, and what the model is called with."""
        if self.family in WHOLE:
            processor = WHOLE[self.family](
                image_processor=self.image_processor, tokenizer=self.tokenizer, **self.settings
            )
            outputs = processor(
                images=[image],
                text=[placeholder],
                add_special_tokens=False,
                return_tensors="np",
                **options,
            )
            [token_ids] = outputs.pop("input_ids").tolist()
            return token_ids, dict(outputs)
        names = models()[self.family].token_names | self.settings
        state: dict[str, Any] = {
            "image_processor": self.image_processor,
            "image_token": placeholder,
        }
        if self.family == "smolvlm":
            options = dict(options) | {"return_row_col_info": True}
            method: Any = transformers.SmolVLMProcessor.replace_image_token
        elif "patch_size" in names:
            side = names["patch_size"] * names["spatial_merge_size"]
            options = dict(options) | {"patch_size": side}
            method = pixtral_processor().replace_image_token
        else:
            method = transformers.Qwen3VLProcessor.replace_image_token
        outputs = self.image_processor(images=[image], return_tensors="np", **options)
        text = method(SimpleNamespace(**names | state), outputs, 0)
        return self.tokenizer.encode(text, add_special_tokens=False), dict(outputs)


def check(
    family: str,
    folder: Path,
    size: tuple[int, int],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Compare a picture with the reference; return the number of its embeddings."""
    image = picture(size)
    processor = processor_of(folder, **options)
    processed = processor.process(image, "auto")
    reference = Reference(family, folder)
    token_ids, tensors = reference.run(processor.placeholder, image, options)
    assert reference.tokenizer.encode(processed.text, add_special_tokens=False) == token_ids
    config = transformers.AutoConfig.from_pretrained(folder)
    assert processed.num_embeds == token_ids.count(config.image_token_id)
    for name, tensor in processed.tensors.items():
        assert tensor.flags.c_contiguous and tensor.dtype in (np.float32, np.int64), name
        np.testing.assert_array_equal(tensor, tensors[name])
    rows, columns = processed.grid
    assert rows * columns == (processed.num_embeds if "qwen" in family else 0)
    return processed.num_embeds


@pytest.mark.parametrize("family", FAMILIES)
def test_text_and_tensors_are_those_of_the_checkpoints_processor(
    vision_checkpoint: Callable[[str], Path], family: str
) -> None:
    folder = vision_checkpoint(family)
    sizes = SIZES if family != "mistral3" else SIZES[1:]  # transformers fails at one token
    num_embeds = [check(family, folder, size) for size in sizes]
    assert min(num_embeds) > 0


def test_pan_and_scan_only_by_option(vision_checkpoint: Callable[[str], Path]) -> None:
    folder = vision_checkpoint("gemma3")
    assert check("gemma3", folder, (900, 300)) == 16
    assert check("gemma3", folder, (900, 300), {"do_pan_and_scan": True}) == 4 * 16
    assert check("gemma3", folder, (300, 300), {"do_pan_and_scan": True}) == 16


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("smolvlm", {"size": {"longest_edge": 128}}),
        ("qwen3_vl", {"size": {"shortest_edge": 2048, "longest_edge": 8192}}),
        ("mistral3", {"size": {"longest_edge": 56}}),
        ("llava", {"image_mean": [0.5, 0.5, 0.5]}),
    ],
)
def test_options_are_those_of_the_image_processor(
    vision_checkpoint: Callable[[str], Path], family: str, options: dict[str, Any]
) -> None:
    folder = vision_checkpoint(family)
    num_embeds = check(family, folder, (300, 450), options)
    if "size" in options:
        assert num_embeds < check(family, folder, (300, 450))


def test_older_names_of_sizes(vision_checkpoint: Callable[[str], Path]) -> None:
    folder = vision_checkpoint("qwen2_5_vl")
    processor = processor_of(folder, max_pixels=28 * 28 * 6, min_pixels=28 * 28)
    assert processor.process(picture((300, 300)), "auto").grid == (2, 2)


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("qwen3_vl", {"max_pixel": 5}, "'max_pixel' is unknown; .* max_pixels"),
        ("qwen3_vl", {"patch_size": 7}, "'patch_size' is unknown"),
        ("qwen3_vl", {"max_pixels": "many"}, "max_pixels 'many'"),
        ("qwen3_vl", {"do_resize": False}, "do_resize False"),
        ("smolvlm", {"size": {"longest": 3}}, "size {'longest': 3}"),
        ("smolvlm", {"do_image_splitting": "yes"}, "do_image_splitting 'yes'"),
        ("llava", {"do_center_crop": False}, "do_center_crop False: .* 64 x 64"),
        ("gemma3", {"size": {"height": 32, "width": 32}}, "size .* 64 x 64 pixels"),
    ],
)
def test_wrong_options_are_refused_by_name(
    vision_checkpoint: Callable[[str], Path], family: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        processor_of(vision_checkpoint(family), **options)


@pytest.mark.parametrize("number", [0, -1, "many"])
def test_a_file_with_a_wrong_number_of_tokens(
    vision_checkpoint: Callable[[str], Path], tmp_path: Path, number: object
) -> None:
    folder = shutil.copytree(vision_checkpoint("smolvlm"), tmp_path / "wrong")
    settings = json.dumps({"image_seq_len": number})
    (folder / "processor_config.json").write_text(settings, encoding="utf8")
    with pytest.raises(ConfigError, match="processor_config.json"):
        processor_of(folder)


@pytest.mark.parametrize(
    ("family", "file", "field", "value"),
    [
        ("llava_next", "config.json", "image_grid_pinpoints", [[64, 10**9]]),
        ("llava_next", "config.json", "image_grid_pinpoints", []),
        ("llava", "processor_config.json", "patch_size", -1),
        ("qwen2_5_vl", "config.json", "window_size", 0),
        ("qwen2_5_vl", "preprocessor_config.json", "temporal_patch_size", 0),
        ("gemma3", "config.json", "mm_tokens_per_image", 10**9),
        ("smolvlm", "preprocessor_config.json", "size", {"height": 30000, "width": 64}),
    ],
)
def test_files_with_numbers_out_of_bounds(
    vision_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    file: str,
    field: str,
    value: Any,
) -> None:
    folder = shutil.copytree(vision_checkpoint(family), tmp_path / "wrong")
    values = json.loads((folder / file).read_text(encoding="utf8"))
    part = values["vision_config"] if field in values.get("vision_config", {}) else values
    part[field] = value
    (folder / file).write_text(json.dumps(values), encoding="utf8")
    with pytest.raises(ConfigError, match=f"wrong/{file}: ({field}|height) (10+|30000|-1|0|\\[])"):
        processor_of(folder)


@pytest.mark.parametrize(
    ("family", "size", "most_embeds"),
    [
        ("smolvlm", (300, 450), 16),
        ("qwen3_vl", (3000, 3000), 16 * 16),
        ("mistral3", (3000, 3000), 19 * 19),
        ("gemma3", (900, 300), 16),
        ("llava", (64, 64), 64),
    ],
)
def test_detail_low_has_fewer_tokens(
    vision_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    size: tuple[int, int],
    most_embeds: int,
) -> None:
    folder = tmp_path / family
    folder.symlink_to(vision_checkpoint(family))
    options: dict[str, Any] = {}
    if family == "gemma3":
        options["do_pan_and_scan"] = True
    elif family == "qwen3_vl":
        options["max_pixels"] = 4096 * 4096
    elif family == "mistral3":
        options["size"] = {"longest_edge": 1540}
    processor = processor_of(folder, **options)
    auto, high, low = (
        processor.process(picture(size), detail).num_embeds for detail in ("auto", "high", "low")
    )
    assert auto == high >= low
    assert low <= most_embeds < (high if family != "llava" else 65)


def test_pictures_that_are_too_long_are_refused(vision_checkpoint: Callable[[str], Path]) -> None:
    for family in ("qwen2_5_vl", "mistral3"):
        processor = processor_of(vision_checkpoint(family))
        with pytest.raises(InvalidRequest, match="1000 x 1 pixels, which the model cannot read"):
            processor.process(picture((1000, 1)), "auto")


BASE_INSTALL = """
import sys
from pathlib import Path
from PIL import Image
from servd.base import plugins
from servd.worker.multimodal import ImageProcessor

for name in ("torch", "torchvision", "num2words"):
    sys.modules[name] = None  # an import fails
for name, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    family = plugins.load_class("servd.worker.multimodal", name, ImageProcessor)
    for detail in ("high", "low"):
        print(family(Path(folder), {}).process(Image.new("RGB", (300, 200)), detail).num_embeds)
"""


def test_processors_need_pillow_and_numpy_alone(vision_checkpoint: Callable[[str], Path]) -> None:
    folders = [vision_checkpoint(name) for name in FAMILIES]
    arguments = [text for folder in folders for text in (processor_name(folder), str(folder))]
    command = [sys.executable, "-c", BASE_INSTALL, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(result.stdout.split()) == 2 * len(FAMILIES)


def test_an_unknown_image_processor_is_refused(
    vision_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    for file in vision_checkpoint("llava").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "preprocessor_config.json"
    settings = json.loads(path.read_text(encoding="utf8"))
    settings["auto_map"] = {"AutoImageProcessor": "theirs.Theirs"}
    path.write_text(json.dumps(settings), encoding="utf8")
    processor_of(tmp_path)  # loads no code of others
    path.write_text(json.dumps(settings | {"image_processor_type": "Theirs"}), encoding="utf8")
    with pytest.raises(UnsupportedModel, match="'Theirs'.*--language-model-only"):
        processor_of(tmp_path)
