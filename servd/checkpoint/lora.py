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

from servd.base.errors import ConfigError
from servd.checkpoint.account import account_for, without_nulls

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
# bytes
MAX_CONFIG = 1 << 20
MAX_HEADER = 1 << 24
MAX_NAME = 256  # characters of a tensor's name
PATTERN_SECONDS = 2.0  # for the patterns of a key and all modules
MAX_SHOWN = 3  # names of modules in the log
SIZES = {"F32": 4, "BF16": 2, "F16": 2}  # bytes of a number
# The last bytes of infinite numbers and NaN, whose exponent has all bits set.
WIDE = re.compile(rb"(?=[\x80-\xff][\x7f\xff])")
NARROW = re.compile(rb"[\x7c-\x7f\xfc-\xff]")
# Ways to begin a training that change the weights of the model, too.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Parts of names that models have, where adapters have no linear layer to change.
NO_LINEAR = {
    ".experts.": "is of experts, each of which computes a few of the tokens",
    ".kv_b_proj": "is applied head by head, to queries and to what attention yields",
    ".gate": "chooses the experts of a token",
    ".conv1d": "is a convolution",
}
HINT = "train it without, or merge it into the model and serve that"


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


class AdapterFiles:
    """The files that PEFT wrote into a folder, without the weights. `modules` maps a name from
    `layer_of` to the names of its two tensors and the factor of their product. Raises ConfigError
    if a file is missing or broken, or if servd does not support the adapter.
    """

    def __init__(self, folder: str | Path, label: str | None = None) -> None:
        self.folder = Path(folder)
        self.label = label or str(folder)  # in errors
        self.config = self._read_config()
        self.modules: dict[str, tuple[str, str, float]] = {}
        self.shapes: dict[str, Shape] = {}  # by name of the tensor
        self.dtypes: dict[str, str] = {}
        self.places: dict[str, tuple[int, int]] = {}  # first byte and size of each tensor's data
        try:
            self._read_modules()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise self._error(f"{CONFIG} or {TENSORS} cannot be read: {error!r}") from None

    @property
    def rank(self) -> int:
        """The largest rank of the modules."""
        return max(self.shapes[a][0] for a, _, _ in self.modules.values())

    def _read_pairs(self) -> dict[str, dict[str, str]]:
        """Return the names of each module's tensors, by A and B."""
        pairs: dict[str, dict[str, str]] = {}
        for tensor, info in self._read_header().items():
            if len(tensor) > MAX_NAME or (match := TENSOR.fullmatch(tensor)) is None:
                raise self._error(f"tensor {tensor[:80]} is not of a linear layer: {HINT}")
            pairs.setdefault(match[1], {})[match[2]] = tensor
            shape = info["shape"]
            if info["dtype"] not in SIZES or len(shape) != 2 or min(shape) < 1:
                raise self._error(f"tensor {tensor} is {info['dtype']} {shape}, expected a matrix")
            self.shapes[tensor] = shape[0], shape[1]
            begin, end = info["data_offsets"]
            num_bytes = shape[0] * shape[1] * SIZES[info["dtype"]]
            if begin < 0 or end - begin != num_bytes:
                raise self._error(
                    f"tensor {tensor} is at bytes {begin} to {end}, but {info['dtype']} {shape} "
                    f"has {num_bytes} bytes: save the adapter again"
                )
            self.places[tensor] = begin, num_bytes
            self.dtypes[tensor] = info["dtype"]
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
        ranks = self._numbers("rank_pattern", "r", pairs)
        alphas = self._numbers("alpha_pattern", "lora_alpha", pairs)
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
            a = names["A"]
            b = names["B"]
            rank = self.shapes[a][0]
            expected = ranks[module]
            if rank != self.shapes[b][1] or rank != expected:
                shapes = f"{[*self.shapes[a]]} and {[*self.shapes[b]]}"
                raise self._error(f"{module} has {shapes}, but {CONFIG} has rank {expected}")
            divisor = math.sqrt(rank) if self.config.get("use_rslora") else rank
            self.modules[layer] = a, b, alphas[module] / divisor
        if not self.modules:
            raise self._error(f"{TENSORS} holds no tensors for the target_modules")

    def _targets(self, modules: Mapping[str, Any]) -> set[str]:
        """Return those of the modules that PEFT changes, by the keys of adapter_config.json."""
        excluded = self._matching("exclude_modules", modules)
        targets = {*modules}
        if (stated := self.config.get("target_modules")) is None:
            raise self._error(f"{CONFIG} has no target_modules: name the modules it changes")
        if not (isinstance(stated, str) and stated.lower() == ALL_LINEAR):
            targets = self._matching("target_modules", modules)
        numbers = self.config.get("layers_to_transform")
        numbers = [numbers] if isinstance(numbers, int) else numbers
        if numbers and not isinstance(stated, str):
            if not all(type(number) is int for number in numbers):
                raise self._error(f"layers_to_transform {numbers} are not numbers of layers")
            patterns = self.config.get("layers_pattern") or []
            patterns = [patterns] if isinstance(patterns, str) else patterns
            if not all(re.fullmatch(r"\w+", pattern) for pattern in patterns):
                raise self._error(f"layers_pattern {patterns} are not plain names")
            forms = [rf"(?:^|.*?\.){pattern}\." for pattern in patterns] or [r".*?\.[^.]*\."]
            form = re.compile(rf"(?:{'|'.join(forms)})(\d+)\.")
            matches = {module: form.match(module) for module in targets}
            targets = {key for key, match in matches.items() if match and int(match[1]) in numbers}
        return targets - excluded

    def _matching(self, key: str, modules: Iterable[str]) -> set[str]:
        """Return the modules that a pattern, or a list of the ends of names, stands for."""
        stated = self.config.get(key) or []
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
                    raise ValueError(f"{key} {pattern!r:.80}: {error}") from None
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
                for part, what in NO_LINEAR.items():
                    if part in f"{module}." if part[-1] == "." else module.endswith(part):
                        raise self._error(f"{module} {what}: adapters cannot change it; {HINT}")
                raise self._error(f"the model has no linear layer {module}")
            inputs = self.shapes[a][1]
            outputs = self.shapes[b][0]
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
            for tensor, (begin, num_bytes) in self.places.items():
                file.seek(start + begin)
                dtype = self.dtypes[tensor]
                if not _is_finite(file.read(num_bytes), dtype):
                    raise self._error(f"tensor {tensor} has values that are NaN or infinite")

    def _error(self, why: str) -> ConfigError:
        return ConfigError(f"the adapter {self.label}: {why}")

    def _read_config(self) -> dict[str, Any]:
        if (size := self._size(CONFIG)) > MAX_CONFIG:
            raise self._error(f"{CONFIG} has {size} bytes, the most is {MAX_CONFIG}")
        try:
            config = msgspec.json.decode((self.folder / CONFIG).read_bytes(), type=dict[str, Any])
        except OSError as error:
            raise self._error(f"{CONFIG}: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._error(f"{CONFIG}: {error}") from None
        if (kind := config.get("peft_type", "LORA")) not in ("LORA", "lora"):
            raise self._error(f"it is of type {kind}, only LORA is supported")
        init = config.get("init_lora_weights")
        if isinstance(init, str) and init.lower().startswith(CHANGES_BASE):
            raise self._error(f"init_lora_weights {init!r} changes the model, too: {HINT}")
        if (account := account_for(CONFIG, without_nulls(config), "adapter")).unknown:
            raise self._error(
                f"{CONFIG}: servd does not support {account.in_words}: remove what does not change "
                f"answers, or {HINT}"
            )
        return config

    def _read_header(self) -> dict[str, dict[str, Any]]:
        path = self.folder / TENSORS
        if not path.exists() and (self.folder / "adapter_model.bin").exists():
            raise self._error("adapter_model.bin can run any code: save it as safetensors")
        file_size = self._size(TENSORS)
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > min(MAX_HEADER, file_size):
                    raise self._error(f"{TENSORS} is cut off, or is another kind of file")
                header = msgspec.json.decode(file.read(size), type=dict[str, dict[str, Any]])
        except OSError as error:
            raise self._error(f"{TENSORS}: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self._error(f"{TENSORS} is not a safetensors file") from None
        header.pop("__metadata__", None)
        end = max((about.get("data_offsets", [0, 0])[1] for about in header.values()), default=0)
        if 8 + size + end != file_size:
            raise self._error(f"{TENSORS} is cut off, or is another kind of file")
        return header

    def _size(self, name: str) -> int:
        """Return a regular file's size. Raises ConfigError for other files, which could block."""
        try:
            status = (self.folder / name).stat()
        except OSError as error:
            raise self._error(f"{name}: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise self._error(f"{name} is no file")
        return status.st_size

    def _numbers(self, pattern: str, key: str, modules: Iterable[str]) -> dict[str, float]:
        """Return each module's number: of the first entry of `pattern` that matches the end of its
        name, or of `key`.
        """
        patterns: dict[str, float] = self.config.get(pattern) or {}
        first = self._match(pattern, [rf"(.*\.)?({ending})" for ending in patterns], modules)
        default = self.config.get(key)
        numbers = [*patterns.values(), 8 if default is None else default]  # 8: of PEFT
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
