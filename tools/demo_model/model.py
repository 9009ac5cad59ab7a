"""A Qwen3 decoder in plain torch, with the parameter names of Hugging Face checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_PAIRS = 4  # rotary pairs, the fastest ones, that tell the token before from others


@dataclass(frozen=True)
class ModelConfig:
    """Sizes, under their names in config.json."""

    vocab_size: int = 4000
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 5
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def to_json(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **self.__dict__,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
        }


class Attention(nn.Module):
    """Causal attention with grouped key-value heads, normed queries and keys, and rotary
    positions.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.group = config.num_attention_heads // config.num_key_value_heads
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """x: [batch, length, hidden]; cos, sin: [length, head_dim]; mask: see `Qwen3.forward`."""
        heads = (*x.shape[:2], -1, self.head_dim)
        # After transpose: [batch, heads, length, head_dim].
        q = rotate(self.q_norm(self.q_proj(x).view(heads).float()).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads).float()).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v, mask, is_causal=mask is None
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each on the normed stream and added to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """x: [batch, length, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Qwen3(nn.Module):
    """The language model; its output layer is the embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        residual_scale = (2 * config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = (
                    residual_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                )
                nn.init.normal_(parameter, std=0.02 * scale)
        self._look_back()

    @torch.no_grad()
    def _look_back(self) -> None:
        """Let the heads of the first layer's first group begin by looking at the token before.

        Copying (names, numbers, arguments) needs such a head, and only once there is one can the
        layers above learn to copy. On text that is nothing but copies, that takes a hundred steps
        from here; from random weights it had not begun after 450.
        """
        config = self.config
        half = config.head_dim // 2
        # One number that all tokens share, so that queries and keys can say something whatever the
        # token is.
        self.model.embed_tokens.weight[:, 0] = 0.2
        angle = config.rope_theta ** -(torch.arange(NUM_PAIRS) / half)
        query, key = torch.zeros(2, config.head_dim)
        query[:NUM_PAIRS] = 1.0
        # The query, turned back by one position.
        key[:NUM_PAIRS] = angle.cos()
        key[half : half + NUM_PAIRS] = angle.sin()
        weights = dict(self.named_parameters())
        weights["model.layers.0.self_attn.k_proj.weight"][: config.head_dim, 0] = key
        group = config.num_attention_heads // config.num_key_value_heads
        weights["model.layers.0.self_attn.q_proj.weight"][: group * config.head_dim, 0] = (
            query.repeat(group)
        )

    def forward(self, input_ids: Tensor, is_target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits of the target places.

        Args:
            input_ids: [batch, length]; padding is on the right.
            is_target: [batch, length] of bool.
            mask: [batch, 1, length, length] of bool: which places (last) each place sees; None: all
                up to itself.

        Returns:
            [number of target places, vocab].
        """
        cos, sin = rotary_table(self.config, input_ids.shape[1], input_ids.device)
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return F.linear(self.model.norm(x[is_target]), self.model.embed_tokens.weight)


def rotary_table(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, head_dim], of the rotary angles in two equal halves."""
    half = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
    angles = torch.outer(torch.arange(length, device=device).float(), config.rope_theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [..., length, head_dim], turned by the angles of its positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
