"""Image processors of transformers that need only Pillow and NumPy, made from a checkpoint's files:
what those of all families share.
"""

import json
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from servd.base.errors import ConfigError, InvalidRequest, UnsupportedModel
from servd.checkpoint.account import object_in
from servd.checkpoint.config_json import read_json
from servd.checkpoint.multimodal_config import PROCESSORS, TEXT
from servd.checkpoint.tokenizer_files import CONFIG, EXTRA, SPECIAL
from servd.worker.multimodal import Detail, ImageProcessor, ProcessedImage

FLAG = "--mm-processor-kwargs"
# Options that the weights or servd decide.
FIXED = frozenset(
    """
    data_format device disable_grouping image_grid_pinpoints image_seq_length input_data_format
    max_image_size merge_size patch_size return_row_col_info return_tensors temporal_patch_size
    """.split()
)
# Numbers of a checkpoint's files that libraries use without a check, some only in a request: 0
# fails there, and a loop up to 10**9 does not end.
LENGTHS = "height width image_grid_pinpoints image_seq_len image_seq_length mm_tokens_per_image"
SIDES = "merge_size patch_size scale_factor spatial_merge_size temporal_patch_size"
BOUNDS = dict.fromkeys(LENGTHS.split(), range(1, 16384))
BOUNDS |= dict.fromkeys(SIDES.split(), range(1, 256))
BOUNDS |= {"num_additional_image_tokens": range(16), "window_size": range(16, 16384)}
OLD_SIZES = ("min_pixels", "max_pixels")  # Qwen's, which are in `size` today
SAMPLE = Image.new("RGB", (240, 40))  # a picture on which options are tried
PIXELS = {"pixel_values": np.float32}  # an input of all towers
SIZED_PIXELS = PIXELS | {"image_sizes": np.int64}
LOW_SIDE = 512  # pixels of a side at `detail` low, where a family reads pictures of any size


class PilProcessor(ImageProcessor):
    """An image processor of a checkpoint: transformers makes the tensors, a family's class the
    text.
    """

    kinds: ClassVar[tuple[str, ...]]  # of transformers' image processors; the first is the default
    has_parts: ClassVar[bool] = False  # see ProcessedImage.num_parts
    has_fixed_size: ClassVar[bool] = True  # whether the tower reads pictures of one size alone
    inputs: ClassVar[Mapping[str, Any]]  # of the tower: name in transformers' outputs -> dtype
    image_token: str  # what stands in `ProcessedImage.text` for an embedding

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        super().__init__(folder, options)
        for name in ("config.json", *PROCESSORS):
            _check_bounds(folder / name, "", read_json(folder / name, {}))
        self.config = read_json(folder / "config.json")
        self.vision = object_in(self.config, "vision_config") or {}
        both, alone = (folder / name for name in PROCESSORS)
        self.settings = read_json(both, {})  # of the processor of text and pictures together
        preprocessor = object_in(self.settings, "image_processor") or read_json(alone)
        self.kind = self._find_kind(str(preprocessor.get("image_processor_type", "")))
        self.tokens = read_json(folder / SPECIAL, {}) | read_json(folder / CONFIG, {})
        extra = self.tokens.get(EXTRA[0])
        if isinstance(extra, dict):
            self.tokens |= extra
        self.set_tokens()
        try:
            self.high = self._make(preprocessor)
            self._check_options()
            self.high = self._make(preprocessor, options)
            self.low = self._make(preprocessor, options, self.low_options())
            for detail in ("high", "low"):
                self.process(SAMPLE, detail)
        except ConfigError:
            raise
        except Exception as error:  # transformers raises any
            files = " and ".join(PROCESSORS)
            text = f"{folder}: {files} with {FLAG} {json.dumps(dict(options))}: {error}"
            raise ConfigError(text) from None

    @abstractmethod
    def set_tokens(self) -> None:
        """Set `placeholder`, `image_token` and what else the text is made of."""

    @abstractmethod
    def expand(self, outputs: Mapping[str, Any]) -> str:
        """Return the text for a picture, from transformers' outputs for it."""

    def family_settings(self) -> dict[str, Any]:
        """Return settings that a family's processor prefers to those of the file."""
        return {}

    def low_options(self) -> dict[str, Any]:
        """Return what is different at `detail` low. `self.high` is there."""
        return {}

    def grid(self, outputs: Mapping[str, Any]) -> tuple[int, int]:
        """Return MultiModalFeature.grid."""
        return 0, 0

    def process(self, image: Image.Image, detail: Detail) -> ProcessedImage:
        processor = self.low if detail == "low" else self.high
        try:
            outputs = processor(images=[image], return_tensors="np")
        except (ArithmeticError, ValueError) as error:
            raise InvalidRequest(
                f"it has {image.width} x {image.height} pixels, which the model cannot read: send "
                "one that is less long and thin"
            ) from error
        text = self.expand(outputs)
        tensors = {
            name: np.ascontiguousarray(outputs[name], dtype=dtype)
            for name, dtype in self.inputs.items()
        }
        num_embeds = text.count(self.image_token)
        if not num_embeds:
            raise ValueError(f"a picture has no {self.image_token} in {text!r:.200}")
        num_parts = tensors["pixel_values"].shape[1] if self.has_parts else 1
        return ProcessedImage(text, num_embeds, self.grid(outputs), tensors, num_parts)

    def token(self, name: str, default: str) -> str:
        """Return the special token of a name in the tokenizer's files."""
        value = self.tokens.get(name) or default
        return str(value["content"] if isinstance(value, dict) else value)

    def _find_kind(self, name: str) -> str:
        name = name.removesuffix("Fast").removesuffix("Pil") or self.kinds[0]
        if name not in self.kinds:
            raise UnsupportedModel(
                f"{self.folder}: image_processor_type {name!r:.50}: for this model, servd reads "
                f"{' and '.join(self.kinds)}; --language-model-only serves it without pictures"
            )
        return name

    def _make(self, preprocessor: Mapping[str, Any], *options: Mapping[str, Any]) -> Any:
        """Return transformers' image processor of a preprocessor_config.json. Later `options`
        replace those before them.
        """
        import transformers

        processor_class: Any = getattr(transformers, f"{self.kind}Pil")
        settings: dict[str, Any] = {}
        for layer in (preprocessor, self.family_settings(), *options):
            if "size" in layer:
                settings = {key: settings[key] for key in settings if key not in OLD_SIZES}
            settings |= layer
        names = processor_class.valid_kwargs.__annotations__
        return processor_class(**{key: settings[key] for key in settings if key in names})

    def _check_options(self) -> None:
        """Raise ConfigError for an option that is unknown or has no valid value. `self.high` has
        none of them.
        """
        allowed = {*self.high.valid_kwargs.__annotations__} - FIXED
        shape = self.high(images=[SAMPLE], return_tensors="np")["pixel_values"].shape
        for name, value in self.options.items():
            if name not in allowed:
                there_are = ", ".join(sorted(allowed))
                raise ConfigError(f"{FLAG}: {name!r} is unknown; there are: {there_are}")
            option = f"{FLAG}: {name} {value!r:.50}"
            try:
                with warnings.catch_warnings(action="ignore"):  # about the names of OLD_SIZES
                    outputs = self.high(images=[SAMPLE], return_tensors="np", **{name: value})
            except Exception as error:  # transformers raises any
                raise ConfigError(f"{option}: {error}") from None
            if self.has_fixed_size and outputs["pixel_values"].shape[-2:] != shape[-2:]:
                size = " x ".join(map(str, shape[-2:]))
                raise ConfigError(f"{option}: the vision tower reads pictures of {size} pixels")


def _check_bounds(path: Path, name: str, value: Any) -> None:
    """Raise ConfigError if a file's field has a number, perhaps in lists, that is not in BOUNDS."""
    match value:
        case dict():
            for key, inner in value.items():
                if key != TEXT:
                    _check_bounds(path, key if key in BOUNDS else name, inner)
        case [_, *_]:
            for inner in value:
                _check_bounds(path, name, inner)
        case _ if name in BOUNDS and value is not None:
            if type(value) is not int or value not in BOUNDS[name]:
                limits = f"{BOUNDS[name][0]} to {BOUNDS[name][-1]}"
                raise ConfigError(
                    f"{path}: {name} {value!r:.50}: servd reads numbers from {limits}"
                )
