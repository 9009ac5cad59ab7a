"""Facts about a checkpoint for people: size, number of parameters, type of its numbers, license."""

import re
from math import prod
from pathlib import Path

import msgspec

from servd.base.errors import ModelNotFound
from servd.checkpoint import gguf, quantization_config, weight_files

PAGE_HEAD = 4096  # bytes of a README.md, which begins with its tags on the hub
LICENSE = re.compile(rb"^license: *['\"]?([\w.+-]+)", re.MULTILINE)
# Tensors that quantization adds.
ADDED = re.compile(r"(scales?|scale_inv|zeros|zero_point|g_idx|absmax|quant_map|shape)$")


class Facts(msgspec.Struct, frozen=True):
    num_bytes: int = 0  # of the weight files
    num_parameters: int = 0  # 0 if unknown
    precision: str = ""  # such as "gptq" or "Q4_K_M"; "" if it is not quantized
    license: str = ""  # "" if unknown

    @property
    def parameter_size(self) -> str:
        """The number of parameters for people, such as "1.54B"; "" if it is unknown."""
        if self.num_parameters >= 1e9:
            return f"{self.num_parameters / 1e9:.3g}B"
        return f"{self.num_parameters / 1e6:.3g}M" if self.num_parameters else ""


def count_bytes(folder: Path) -> int:
    """Return the size of the weight files in a folder."""
    files = [file for file in folder.iterdir() if file.suffix in (".safetensors", ".gguf")]
    return sum(file.stat().st_size for file in files)


def read_page(folder: Path) -> bytes:
    """Return the beginning of a model's README.md."""
    page = folder / "README.md"
    return page.read_bytes()[:PAGE_HEAD] if page.is_file() else b""


def read_facts(path: str) -> Facts:
    """Return the facts that the files of a folder state, without reading tensors."""
    folder = Path(path)
    if not path:  # of the fake model
        return Facts()
    if (folder / gguf.WEIGHTS).is_symlink():
        return Facts(count_bytes(folder), *gguf.read_facts(weight_files.find_weight_files(folder)))
    method = quantization_config.quantization_of(folder) or {}
    bits = method.get("bits")
    bits = bits if isinstance(bits, int) and 0 < bits <= 32 else 4
    packed = {"I32": 32 // bits, "U8": 2}  # several numbers in one
    count = 0
    try:
        for weights in weight_files.find_weight_files(folder):
            for name, tensor in weight_files.read_header(weights).items():
                if not ADDED.search(name):
                    count += prod(tensor.shape) * packed.get(tensor.dtype, 1)
    except ModelNotFound:  # only its config is there, or a file is damaged
        count = 0
    license_tag = LICENSE.search(read_page(folder))
    license = license_tag[1].decode(errors="replace") if license_tag else ""
    return Facts(count_bytes(folder), count, method.get("quant_method", ""), license)
