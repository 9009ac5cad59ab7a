"""Rotary position embedding (https://arxiv.org/abs/2104.09864) with config.json's scalings."""

import logging
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from servd.base.errors import UnsupportedModel
from servd.checkpoint.account import is_number, object_in
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.multimodal_config import MultiModalSpec
from servd.checkpoint.overrides import NUMBERS, ROPE, ROPE_TYPES, rope_of
from servd.worker import ops
from servd.worker.ops.reference import Rotation

log = logging.getLogger("servd.worker")

MAY_BE_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # which leaves them out


class Rotary(nn.Module):
    """The cos and sin of each position, computed once per step and used by all layers."""

    # Whether config.json may limit the rotation to a part of each head.
    is_partial: ClassVar[bool] = False

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dtype = torch.get_default_dtype()
        inv_freq, self.magnitude = frequencies(self.rope_parameters(spec), spec, self.is_partial)
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)  # float32 [pairs]
        self.axes = axes_of(spec, len(inv_freq))
        self.ops = ops.for_device(torch.get_default_device())

    @staticmethod
    def rope_parameters(spec: ModelSpec) -> dict[str, Any]:
        return rope_parameters(spec)

    def forward(self, positions: Tensor) -> Rotation:
        """Return cos and sin of positions [num_tokens], or [3, num_tokens]: time, row, column."""
        if positions.dim() == 1:
            return self.ops.rotation(positions, self.inv_freq, self.magnitude, self.dtype)
        cos, sin = zip(*map(self.forward, positions), strict=True)  # of each axis
        return self._mix(cos), self._mix(sin)

    def _mix(self, axes: Sequence[Tensor]) -> Tensor:
        """Return each pair's numbers by its axis: [num_tokens, pairs]."""
        mixed = axes[0].clone()
        for axis, numbers in enumerate(axes):
            mixed[:, self.axes == axis] = numbers[:, self.axes == axis]
        return mixed


def axes_of(spec: ModelSpec, num_pairs: int) -> Tensor:
    """Return the axis of each pair: 0 time, 1 row, 2 column (M-RoPE). Pairs of a model without
    such axes have 0.
    """
    axes = torch.zeros(num_pairs, dtype=torch.int64, device="cpu")
    if isinstance(spec.multimodal, MultiModalSpec) and spec.multimodal.mrope_section:
        first = 0
        for axis, size in enumerate(spec.multimodal.mrope_section):
            if spec.multimodal.mrope_interleaved:
                axes[axis : 3 * size : 3] = axis
            else:
                axes[first : first + size] = axis
            first += size
    return axes


class OptionalRotary(nn.Module):
    """Rotary positions if config.json asks for them. Layers with a state know the order, too."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        has_positions = spec.config.get("position_embedding_type") == "rope"
        self.rotary = Rotary(spec) if has_positions else None

    def forward(self, positions: Tensor) -> Rotation | None:
        return None if self.rotary is None else self.rotary(positions)


def rope_parameters(spec: ModelSpec) -> dict[str, Any]:
    """Return rope_type, rope_theta and the scaling's own keys, from either form of config.json.
    transformers 5 writes `rope_parameters`; earlier checkpoints have `rope_theta` and
    `rope_scaling`. Raises UnsupportedModel if a value is no rotation.
    """
    config = spec.config
    for place in ROPE:
        stated = object_in(config, place) or {}
        if any(isinstance(value, dict) for value in stated.values()):
            raise UnsupportedModel(f"{place} that differs from layer to layer is not supported")
    rope = dict(rope_of(config))
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope.setdefault("original_max_position_embeddings", spec.max_position_embeddings)
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    for key in NUMBERS & rope.keys():
        value = rope[key]
        is_left_out = value is None and key != "rope_theta" or value == 0 and key in MAY_BE_ZERO
        if not is_left_out and not (is_number(value) and value > 0):
            raise UnsupportedModel(f"config.json: {key} {value!r:.50} is no number above 0")
    return rope


def frequencies(
    rope: dict[str, Any], spec: ModelSpec, is_partial: bool = False
) -> tuple[Tensor, float]:
    """Return the angle per position of each pair [pairs], and the factor on cos and sin. Raises
    UnsupportedModel if angles differ by layer or cover a part of the head, or if `rope_type` is
    unknown or lacks a key.
    """
    partial_factor = rope.get("partial_rotary_factor") or 1.0
    if rope["rope_type"] == "proportional":
        return _proportional(rope, spec.head_dim, partial_factor), 1.0
    if partial_factor > 1 or partial_factor < 1 and not is_partial:
        raise UnsupportedModel(f"partial_rotary_factor {partial_factor} is not supported")
    size = int(spec.head_dim * partial_factor)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    inv_freq = 1.0 / rope["rope_theta"] ** exponents
    needed = {**ROPE_TYPES, "yarn": ()}.get(str(rope["rope_type"]), ())
    if missing := [key for key in needed if rope.get(key) is None]:
        raise UnsupportedModel(
            f"config.json has rope_type {rope['rope_type']!r} without {', '.join(missing)}"
        )
    match rope["rope_type"]:
        case "default":
            return inv_freq, 1.0
        case "linear":
            return inv_freq / rope["factor"], 1.0
        case "dynamic":
            return _dynamic(inv_freq, rope, spec), 1.0
        case "llama3":
            return _llama3(inv_freq, rope), 1.0
        case "yarn":
            return _yarn(inv_freq, rope, spec)
        case "longrope":
            return _longrope(inv_freq, rope, spec)
        case other:
            raise UnsupportedModel(
                f"config.json: rope_type {other!r} is not supported; there are: default, "
                "dynamic, linear, llama3, longrope, proportional, yarn"
            )


def _proportional(rope: dict[str, Any], head_dim: int, share: float) -> Tensor:
    """Return frequencies of which only the first are above zero, those of a share of each head."""
    num_turned = int(share * head_dim // 2)
    exponents = torch.arange(0, 2 * num_turned, 2, dtype=torch.float32) / head_dim
    inv_freq = torch.zeros(head_dim // 2)
    inv_freq[:num_turned] = 1.0 / rope["rope_theta"] ** exponents
    return inv_freq / (rope.get("factor") or 1.0)


def _dynamic(inv_freq: Tensor, rope: dict[str, Any], spec: ModelSpec) -> Tensor:
    """Return frequencies of dynamic NTK with the base for max_model_len, for all requests, because
    keys in the cache must not depend on a request's final length.
    """
    original = rope["original_max_position_embeddings"]
    size = 2 * len(inv_freq)
    longest = max(spec.max_model_len or spec.max_position_embeddings, original)
    grown = rope["factor"] * longest / original - (rope["factor"] - 1)
    base = rope["rope_theta"] * grown ** (size / (size - 2))
    return 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


def _llama3(inv_freq: Tensor, rope: dict[str, Any]) -> Tensor:
    """Return frequencies with long wavelengths slowed down, short wavelengths kept (Llama 3.1)."""
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    wavelengths = 2 * math.pi / inv_freq
    keep = (rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    keep = keep.clamp(0, 1)
    return (1 - keep) * inv_freq / rope["factor"] + keep * inv_freq


def _yarn(inv_freq: Tensor, rope: dict[str, Any], spec: ModelSpec) -> tuple[Tensor, float]:
    """Return frequencies and factor of YaRN (arXiv:2309.00071), which interpolates slow pairs."""
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or spec.max_position_embeddings / original
    num_pairs = len(inv_freq)

    def pair_with(turns: float) -> float:
        """Return the (fractional) pair that makes `turns` turns over the original context."""
        return num_pairs * math.log(original / (turns * 2 * math.pi)) / math.log(rope["rope_theta"])

    first = pair_with(rope.get("beta_fast") or 32)
    last = pair_with(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, 2 * num_pairs - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(num_pairs, dtype=torch.float32)
    interpolated = ((pairs - first) / (last - first)).clamp(0, 1)
    inv_freq = inv_freq / factor * interpolated + inv_freq * (1 - interpolated)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return inv_freq, rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return inv_freq, magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return inv_freq, magnitude(1.0)


def _longrope(inv_freq: Tensor, rope: dict[str, Any], spec: ModelSpec) -> tuple[Tensor, float]:
    """Return frequencies with a factor for each pair (arXiv:2402.13753), for short or long contexts
    by max_model_len, because keys in the cache must not depend on a request's length.
    """
    original = rope["original_max_position_embeddings"]
    is_long = (spec.max_model_len or spec.max_position_embeddings) > original
    if is_long:
        log.info(
            "rotary positions are scaled for contexts over %d tokens, in shorter requests "
            "too; --max-model-len %d keeps those of short contexts",
            original,
            original,
        )
    factors = torch.tensor(rope["long_factor" if is_long else "short_factor"])
    if factors.shape != inv_freq.shape or not bool((factors > 0).all() & factors.isfinite().all()):
        raise UnsupportedModel(
            f"rope_parameters of longrope have {len(factors)} factors for {len(inv_freq)} pairs, "
            "or one that is no number above 0"
        )
    factor = rope.get("factor") or spec.max_position_embeddings / original
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return inv_freq / factors, magnitude
