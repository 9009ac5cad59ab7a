"""LoRA adapters as files, as PEFT writes them."""

import logging
import math
import re
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from servd.base.errors import ConfigError, ModelNotFound
from servd.checkpoint import account
from servd.checkpoint.account import account_for, without_nulls
from servd.checkpoint.weight_files import Tensor, read_header

log = logging.getLogger("servd.checkpoint")

Shape = tuple[int, int]
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"  # as target_modules
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
LAYER = re.compile(r"\w+\.\d+\..+")
# What PEFT writes before the layers of a language model, in models of its own and as a part of
# multimodal models: names of transformers' modules. Layers of other parts have equal names.
LANGUAGE_MODEL = re.compile(
    r"(?:(?:_orig_mod|module|model|transformer|language_model|text_model|thinker|decoder|"
    r"backbone|biogpt|gpt_neox|rwkv)\.)*(\w+\.\d+\..+)"
)
MAX_CONFIG = 1 << 20  # bytes
MAX_NAME = 256  # characters of a tensor's name
PATTERN_SECONDS = 2.0  # for the patterns of a key and all modules
MAX_SHOWN = 3  # names of modules in the log
SIZES = {"F32": 4, "BF16": 2, "F16": 2}  # bytes of a number
# The last bytes of infinite numbers and NaN, whose exponent has all bits set.
WIDE = re.compile(rb"(?=[\x80-\xff][\x7f\xff])")
NARROW = re.compile(rb"[\x7c-\x7f\xfc-\xff]")
# Names that models have, where adapters have no linear layer to change.
NO_LINEAR = {
    r"\.experts(\.|$)": "is of experts, each of which computes a few of the tokens",
    r"\.kv_b_proj$": "is applied head by head, to queries and to what attention yields",
    r"\.gate$": "chooses the experts of a token",
    r"\.conv1d$": "is a convolution",
}
HINT = "train it without, or merge it into the model and serve that"


class _Config(msgspec.Struct, frozen=True):
    """The keys of adapter_config.json that servd reads, with PEFT's defaults."""

    target_modules: str | list[str] | None = None
    peft_type: str = "LORA"
    exclude_modules: str | list[str] = []
    layers_to_transform: int | list[int] = []
    layers_pattern: str | list[str] = []
    r: int = 8
    rank_pattern: dict[str, int] = {}
    lora_alpha: float = 8
    alpha_pattern: dict[str, float] = {}
    use_rslora: bool = False


def layer_of(module: str) -> str | None:
    """Return a module's name from its layer on, "layers.0.self_attn.q_proj", which is the same for
    every wrapper of the model; None for a module outside of the layers.
    """
    match = LAYER.search(module)
    return match and match[0]


def _is_finite(data: bytes, dtype: str) -> bool:
    """Return whether all numbers, little-endian, are finite."""
    if dtype == "F16":
        return NARROW.search(data[1::2]) is None
    size = SIZES[dtype]
    return all(match.start() % size != size - 2 for match in WIDE.finditer(data))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class AdapterFiles:
    """The files that PEFT wrote into a folder, without the weights. `modules` maps a name from
    `layer_of` to the names of its two tensors and the factor of their product. Raises ConfigError
    if a file is missing or broken, or if servd does not support the adapter.
    """

    def __init__(
        self, folder: str | Path, label: str | None = None, allow_unknown_keys: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.label = label or str(folder)  # in errors
        try:
            self.config = self._read_config(allow_unknown_keys)
            self.tensors = self._read_header()
        except OSError as error:
            raise self._error(str(error)) from None
        self.modules: dict[str, tuple[str, str, float]] = {}
        self._read_modules()

    @property
    def rank(self) -> int:
        """The largest rank of the modules."""
        return max(self.tensors[a].shape[0] for a, _, _ in self.modules.values())

    def _read_pairs(self) -> dict[str, dict[str, str]]:
        """Return the names of each module's tensors, by A and B."""
        pairs: dict[str, dict[str, str]] = {}
        for name, tensor in self.tensors.items():
            if len(name) > MAX_NAME or (match := TENSOR.fullmatch(name)) is None:
                raise self._error(f"tensor {name[:80]} is not of a linear layer: {HINT}")
            pairs.setdefault(match[1], {})[match[2]] = name
            shape = tensor.shape
            if tensor.dtype not in SIZES or len(shape) != 2 or min(shape) < 1:
                raise self._error(f"tensor {name} is {tensor.dtype} {shape}, expected a matrix")
            begin, end = tensor.data_offsets
            num_bytes = math.prod(shape) * SIZES[tensor.dtype]
            if end - begin != num_bytes:
                raise self._error(
                    f"tensor {name} is at bytes {begin} to {end}, but {tensor.dtype} {shape} "
                    f"has {num_bytes} bytes: save the adapter again"
                )
        return pairs

    def _read_modules(self) -> None:
        pairs = self._read_pairs()
        targets = self._targets(pairs)
        if ignored := sorted(pairs.keys() - targets):
            names = ", ".join(ignored[:MAX_SHOWN])
            log.warning(
                "the adapter %s: tensors of %d modules are ignored, which target_modules or "
                "another key of %s excludes: %s",
                *(self.label, len(ignored), CONFIG, names),
            )
        config = self.config
        ranks = self._numbers("rank_pattern", config.rank_pattern, config.r, pairs)
        alphas = self._numbers("alpha_pattern", config.alpha_pattern, config.lora_alpha, pairs)
        for module, names in pairs.items():
            if module not in targets:
                continue
            if names.keys() != {"A", "B"}:
                raise self._error(f"{module} has lora_{[*names][0]} without the other factor")
            if (part := LANGUAGE_MODEL.fullmatch(module)) is None:
                if layer_of(module) is None:
                    raise self._error(f"{module} is not part of a layer: leave it out")
                raise self._error(f"{module} is no layer of the language model: train that only")
            layer = part[1]
            if layer in self.modules:
                raise self._error(f"two modules are called {layer}")
            shape_a = self.tensors[names["A"]].shape
            shape_b = self.tensors[names["B"]].shape
            rank = ranks[module]
            if not shape_a[0] == shape_b[1] == rank:
                shapes = f"{shape_a} and {shape_b}"
                raise self._error(f"{module} has {shapes}, but {CONFIG} has rank {rank}")
            divisor = math.sqrt(rank) if config.use_rslora else rank
            self.modules[layer] = names["A"], names["B"], alphas[module] / divisor
        if not self.modules:
            raise self._error(f"{TENSORS} holds no tensors for the target_modules")

    def _targets(self, modules: Iterable[str]) -> set[str]:
        """Return those of the modules that PEFT changes, by the keys of adapter_config.json."""
        config = self.config
        targets = {*modules}
        if (stated := config.target_modules) is None:
            raise self._error(f"{CONFIG} has no target_modules: name the modules it changes")
        if not (isinstance(stated, str) and stated.lower() == ALL_LINEAR):
            targets = self._matching("target_modules", stated, modules)
        numbers = _as_list(config.layers_to_transform)
        if numbers and not isinstance(stated, str):
            patterns = _as_list(config.layers_pattern or [])
            if not all(re.fullmatch(r"\w+", pattern) for pattern in patterns):
                raise self._error(f"layers_pattern {patterns} are not plain names")
            forms = [rf"(?:^|.*?\.){pattern}\." for pattern in patterns] or [r".*?\.[^.]*\."]
            form = re.compile(rf"(?:{'|'.join(forms)})(\d+)\.")
            matches = {module: form.match(module) for module in targets}
            targets = {key for key, match in matches.items() if match and int(match[1]) in numbers}
        return targets - self._matching("exclude_modules", config.exclude_modules, modules)

    def _matching(self, key: str, stated: str | list[str], modules: Iterable[str]) -> set[str]:
        """Return the modules that a pattern, or a list of the ends of names, stands for."""
        if isinstance(stated, str):
            return {*self._match(key, [stated], modules)}
        endings = tuple(f".{name}" for name in stated)
        return {module for module in modules if f".{module}".endswith(endings)}

    def _match(self, key: str, patterns: list[str], modules: Iterable[str]) -> dict[str, int]:
        """Return the number of the first pattern that matches a module's whole name, by module."""
        import regex  # 7 ms, which servd --help and adapters without patterns do without

        deadline = time.monotonic() + PATTERN_SECONDS
        first: dict[str, int] = {}
        for number, pattern in enumerate(patterns):
            for module in modules:
                seconds = max(deadline - time.monotonic(), 0)
                try:
                    is_match = regex.fullmatch(pattern, module, timeout=seconds, concurrent=True)
                except TimeoutError:
                    raise self._error(
                        f"{key} takes too long to compare: name modules in full"
                    ) from None
                except (regex.error, RecursionError) as error:
                    raise self._error(f"{key} cannot be read: {pattern!r:.80}: {error}") from None
                if is_match:
                    first.setdefault(module, number)
        return first

    def check(self, max_rank: int, layers: Mapping[str, Shape]) -> None:
        """Check that the adapter fits a model with these `layers`: (inputs, outputs) by names from
        `layer_of`; empty: unknown. Raises ConfigError.
        """
        if self.rank > max_rank:
            raise self._error(f"rank {self.rank}, at most {max_rank}: raise --max-lora-rank")
        for module, (a, b, _) in self.modules.items() if layers else ():
            if module not in layers:
                for name, what in NO_LINEAR.items():
                    if re.search(name, module):
                        raise self._error(f"{module} {what}: adapters cannot change it; {HINT}")
                raise self._error(f"the model has no linear layer {module}")
            inputs = self.tensors[a].shape[1]
            outputs = self.tensors[b].shape[0]
            if (inputs, outputs) != (*layers[module],):
                raise self._error(
                    f"{module} has {inputs} inputs and {outputs} outputs, but the model's layer "
                    f"has {layers[module][0]} and {layers[module][1]}: the adapter is for "
                    "another model"
                )

    def check_values(self) -> None:
        """Check that all numbers are finite. Raises ConfigError, which names the tensor."""
        path = self.folder / TENSORS
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            for name, tensor in self.tensors.items():
                begin, end = tensor.data_offsets
                file.seek(start + begin)
                if not _is_finite(file.read(end - begin), tensor.dtype):
                    raise self._error(f"tensor {name} has values that are NaN or infinite")

    def _error(self, why: str) -> ConfigError:
        return ConfigError(f"the adapter {self.label}: {why}")

    def _read_config(self, allow_unknown_keys: bool) -> _Config:
        if (size := self._size(CONFIG)) > MAX_CONFIG:
            raise self._error(f"{CONFIG} has {size} bytes, the most is {MAX_CONFIG}")
        try:
            stated = msgspec.json.decode((self.folder / CONFIG).read_bytes(), type=dict[str, Any])
            keys = without_nulls(stated)
            config = msgspec.convert(keys, _Config)
        except (ValueError, RecursionError) as error:
            raise self._error(f"{CONFIG} cannot be read: {error}") from None
        if config.peft_type not in ("LORA", "lora"):
            raise self._error(f"it is of type {config.peft_type}, only LORA is supported")
        keys_account = account_for(f"the adapter {self.label}: {CONFIG}", keys, "adapter")
        remedy = f"remove what does not change answers, or {HINT}"
        self.account = replace(keys_account, remedy=remedy)
        if not allow_unknown_keys:
            account.check([self.account])
        return config

    def _read_header(self) -> dict[str, Tensor]:
        path = self.folder / TENSORS
        if not path.exists() and (self.folder / "adapter_model.bin").exists():
            raise self._error("adapter_model.bin can run any code: save it as safetensors")
        self._size(TENSORS)
        try:
            return read_header(path)
        except ModelNotFound as error:
            raise self._error(f"{TENSORS} cannot be read: {error}") from None

    def _size(self, name: str) -> int:
        """Return a regular file's size. Raises ConfigError for other files, which could block."""
        status = (self.folder / name).stat()
        if not stat.S_ISREG(status.st_mode):
            raise self._error(f"{name} is no file")
        return status.st_size

    def _numbers(
        self, key: str, patterns: Mapping[str, float], default: float, modules: Iterable[str]
    ) -> dict[str, float]:
        """Return each module's number: of the first pattern that matches the end of its name, or
        else the default.
        """
        first = self._match(key, [rf"(.*\.)?({ending})" for ending in patterns], modules)
        numbers = [*patterns.values(), default]
        return {module: numbers[first.get(module, -1)] for module in modules}


def parse_module(text: str) -> tuple[str, str]:
    """Return name and folder of an entry NAME=FOLDER, or of JSON. Raises ConfigError."""
    name, _, path = text.partition("=")
    if text.startswith("{"):
        try:
            keys = msgspec.json.decode(text, type=dict[str, str | None])
            name = keys.get("name") or ""
            path = keys.get("path") or ""
        except msgspec.DecodeError as error:
            raise ConfigError(f"--lora-modules {text}: {error}") from None
    if not name or not path:
        raise ConfigError(f"--lora-modules {text}: must be NAME=FOLDER, or JSON of name and path")
    return name, path
