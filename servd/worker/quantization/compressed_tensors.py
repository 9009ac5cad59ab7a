"""compressed-tensors: integers of 4 and 8 bits, packed or not, and floats of both.

Activations are not rounded to 8 bits, which is faster on other devices but less exact.
"""

from functools import partial
from pathlib import Path
from typing import Any

import regex
import torch

from servd.base.errors import UnsupportedModel
from servd.worker.layers.quantized import NamedTensors, Quantized
from servd.worker.quantization._packed import (
    Module,
    affine,
    floats,
    nvfp4,
    read_modules,
    scales_of_rows,
    side_by_side,
    take,
    unpack,
)

FORMATS = (
    "pack-quantized",
    "nvfp4-pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)
UNUSED = ("input_scale", "input_zero_point", "input_global_scale")  # scales of activations
PATTERN_SECONDS = 1.0  # for a pattern and a layer


def read(files: list[Path], config: dict[str, Any], device: torch.device) -> NamedTensors:
    """Yield a checkpoint's tensors. The tensors show which layers are quantized, and how. Raises
    UnsupportedModel if dequantizing is not enough.
    """
    groups = config.get("config_groups") or {}
    sparsity = config.get("sparsity_config") or {}
    stated = [config, sparsity, *(group for group in groups.values() if isinstance(group, dict))]
    for name in (part.get("format") for part in stated):
        if name and name not in FORMATS:
            raise UnsupportedModel(
                f"format {name!r} of compressed-tensors is not supported; there are: "
                f"{', '.join(FORMATS)}"
            )
    if (config.get("transform_config") or {}).get("config_groups"):
        raise UnsupportedModel("transforms of compressed-tensors (rotations) are not supported")
    with_weights = [group for group in stated[2:] if group.get("weights")]
    return read_modules(files, partial(_weight, with_weights, device))


def _scheme_of(groups: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the weight scheme of the group with the layer's name, else with a pattern of it, else
    with its class, else of the first group. It is needed only where tensors do not show it.
    """
    schemes = {target: group["weights"] for group in groups for target in group.get("targets", ())}
    patterns = [x for x in sorted(schemes) if x.startswith("re:") and _is_match(x[3:], name)]
    for target in (name, *patterns, "Linear"):
        if target in schemes:
            return schemes[target]
    return groups[0]["weights"] if groups else {}


def _is_match(pattern: str, name: str) -> bool:
    try:
        return regex.match(pattern, name, timeout=PATTERN_SECONDS) is not None
    except (regex.error, TimeoutError) as error:
        raise UnsupportedModel(f"target {f're:{pattern}'!r:.80}: {error}") from None


def _weight(
    groups: list[dict[str, Any]], device: torch.device, name: str, module: Module
) -> Quantized | None:
    scheme = _scheme_of(groups, name)
    stored = {*module}
    if "weight_packed" in module:
        weight = _packed(scheme, device, name, module)
    elif "weight_scale" in module:
        weight = _plain(scheme, device, name, module)
    else:
        return None
    if not scheme.get("symmetric", True) and "weight_zero_point" not in stored:
        raise UnsupportedModel(f"layer {name} has no weight_zero_point, and is not symmetric")
    for leaf in UNUSED:
        module.pop(leaf, None)
    return weight


def _packed(scheme: dict[str, Any], device: torch.device, name: str, module: Module) -> Quantized:
    """Return the weight from `weight_packed` int32 [out, words of a row], `weight_shape` [2],
    `weight_scale`, `weight_zero_point` int32 [words of a column, groups], `weight_g_idx` int [in].
    """
    if "weight_global_scale" in module:
        packed, scale = take(name, module, device, "weight_packed", "weight_scale")
        factor = module.pop("weight_global_scale").float().reshape(()).to(device)
        return nvfp4(name, packed, scale.float() / factor)
    [words] = take(name, module, device, "weight_packed")
    scale, shape = (module.pop(leaf, None) for leaf in ("weight_scale", "weight_shape"))
    if scale is None or shape is None or shape.numel() != 2:
        raise UnsupportedModel(f"layer {name} has no weight_scale or weight_shape [2]")
    bits = scheme.get("num_bits", 4)
    (num_rows, size) = map(int, shape.tolist())
    if not num_rows:  # no values, if only headers were read
        num_rows = len(words)
        size = words.shape[1] * 32 // bits
    bits = next((b for b in (2, 4, 8) if -(-size * b // 32) == words.shape[1]), None)
    if bits is None or num_rows != len(words):
        raise UnsupportedModel(
            f"layer {name} has {list(words.shape)} words for a matrix of {[num_rows, size]}: only "
            "integers of 2, 4 and 8 bits are supported"
        )
    scale, group_size = scales_of_rows(name, (num_rows, size), scale.to(device))
    zeros = None
    if "weight_zero_point" in module:
        [packed] = take(name, module, device, "weight_zero_point")
        if len(packed) != -(-num_rows * bits // 32):
            raise UnsupportedModel(f"layer {name} has zero points that are not packed")
        zeros = unpack(packed.t(), bits)[:, :num_rows].t()
    codes = unpack(words, bits)[:, :size]
    symmetric = scheme.get("symmetric", True)
    weight = affine(
        name, codes, zeros, scale, bits=bits, group_size=group_size, is_symmetric=symmetric
    )
    group_of = module.pop("weight_g_idx", None)
    return weight if group_of is None else side_by_side(name, weight, group_of.to(device))


def _plain(scheme: dict[str, Any], device: torch.device, name: str, module: Module) -> Quantized:
    """Return the weight from `weight` int8 or float8_e4m3fn [out, in], its scale and zero point."""
    [codes] = take(name, module, device, "weight")
    scale = module.pop("weight_scale").to(device)
    zeros = module.pop("weight_zero_point", None)
    if codes.dtype == torch.float8_e4m3fn:
        if zeros is not None and bool(zeros.float().any()):
            raise UnsupportedModel(f"layer {name} has zero points of 8-bit floats")
        return floats(name, codes, scale, scheme.get("block_structure"))
    if codes.dtype != torch.int8:
        raise UnsupportedModel(
            f"layer {name} has a weight_scale and weights of {str(codes.dtype)[6:]}; supported are "
            "int8 and float8_e4m3fn: save the checkpoint compressed"
        )
    scale, group_size = scales_of_rows(name, codes.shape, scale)
    if zeros is not None:
        wide, _ = scales_of_rows(name, codes.shape, zeros.to(device))
        zeros = wide.to(torch.int16).add(128).to(torch.uint8)
    codes = codes.view(torch.uint8) ^ 128
    symmetric = scheme.get("symmetric", True)
    return affine(name, codes, zeros, scale, bits=8, group_size=group_size, is_symmetric=symmetric)
