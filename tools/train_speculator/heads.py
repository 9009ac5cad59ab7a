"""The heads in plain torch, with the names of their published layouts, and what they should say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train_speculator.teacher import Teacher

# Weight in the loss of a place over that of the place before it.
DECAY = 0.8


@dataclass(frozen=True)
class Batch:
    """Examples, padded on the right, and what the model makes of them."""

    ids: Tensor  # int64 [rows, length]
    is_output: Tensor  # bool [rows, length]: the model wrote this token
    features: Tensor  # [rows, length, aux layers * hidden]: what enters these layers
    hidden: Tensor  # [rows, length, hidden]: what the output head reads

    def ahead(self, distance: int) -> tuple[Tensor, Tensor]:
        """Row and position, int64 [n] each, of the tokens for which that one so far ahead is the
        model's.
        """
        rows, positions = self.is_output[:, distance:].nonzero(as_tuple=True)
        return rows, positions


class Wanted:
    """What the model says, wherever it spoke.

    Args:
        batch: what it said.
        logits: [n, hidden] -> [n, draft vocab].
    """

    @torch.no_grad()
    def __init__(self, batch: Batch, logits: Callable[[Tensor], Tensor]) -> None:
        rows, positions = batch.ahead(1)
        self.index = torch.zeros_like(batch.ids)
        self.index[rows, positions] = torch.arange(len(rows), device=rows.device)
        self.made = logits(batch.hidden[rows, positions]).float().log_softmax(-1)

    def at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Log-probabilities after tokens, [n, draft vocab]."""
        return self.made[self.index[rows, positions]]


@dataclass(frozen=True)
class Place:
    """What a head says of the tokens so far ahead, and what the model says."""

    rows: Tensor  # int64 [n]: number of the row
    positions: Tensor  # int64 [n]: of the last token that is known
    logits: Tensor  # [n, draft vocab]
    targets: Tensor  # [n, draft vocab]: log-probabilities
    token_ids: Tensor  # int64 [n]: what stands there, in the target's vocabulary


class Head(nn.Module, ABC):
    """A head of any method."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config  # config.json

    @property
    def aux_layers(self) -> list[int]:
        """Layers of the target whose inputs it reads."""
        return self.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [])

    @abstractmethod
    def start_from(self, teacher: Teacher) -> None:
        """Take first weights from the model where they fit."""

    @abstractmethod
    def places(self, batch: Batch, teacher: Teacher) -> list[Place]:
        """One for each token that is drafted in a row, the next one first."""

    def tokens(self, logits: Tensor) -> Tensor:
        """[n, draft vocab] -> the likeliest tokens, int64 [n]."""
        return logits.argmax(-1)


class Eagle3(Head):
    """A layer over features of three of the target's layers and embeddings of the tokens after
    them (https://arxiv.org/abs/2503.01840).
    """

    d2t: Tensor  # int64 [draft vocab]: id in the target's vocabulary minus id in the draft's
    t2d: Tensor  # bool [vocab]: which of the target's tokens it has

    def __init__(self, config: dict[str, Any], num_steps: int) -> None:
        super().__init__(config)
        size = config["hidden_size"]
        draft_vocab = config["draft_vocab_size"]
        self.num_steps = num_steps
        self.fc = nn.Linear(len(self.aux_layers) * size, size, bias=False)
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(size, eps=config["rms_norm_eps"])
        self.lm_head = nn.Linear(size, draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))

    @property
    def target_ids(self) -> Tensor:
        """Target ids of the draft's vocabulary, int64 [draft vocab]."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def use_vocabulary(self, target_ids: Tensor) -> None:
        """Draft these tokens, sorted int64 [draft vocab]."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids)))
        self.t2d.zero_()[target_ids] = True

    @torch.no_grad()
    def start_from(self, teacher: Teacher) -> None:
        """The target's last layer, which reads the last of the features, and its output head."""
        size = self.config["hidden_size"]
        self.lm_head.weight.copy_(teacher.output_head.weight[self.target_ids])
        self.fc.weight.mul_(0.1)[:, -size:] += torch.eye(size)
        if teacher.last_norm is not None:
            self.norm.weight.copy_(teacher.last_norm)
        layer = teacher.last_layer()
        layer["hidden_norm.weight"] = layer.pop("input_layernorm.weight", torch.empty(0))
        for name, weight in self.midlayer.named_parameters():
            value = layer.get(name, torch.empty(0))
            if value.shape == weight.shape:
                weight.copy_(value)
            elif weight.dim() == 2 and value.shape == (len(weight), size) != weight.shape:
                weight[:, :size] *= 0.1
                weight[:, size:] = value

    def places(self, batch: Batch, teacher: Teacher) -> list[Place]:
        """Training-time test: after the first, a place's features are the head's own."""
        embedded = teacher.embed(batch.ids)
        targets = Wanted(batch, lambda hidden: teacher.logits(hidden, self.target_ids))
        x = self.fc(batch.features)
        made = []
        memory = Memory(batch.ids)
        for step in range(self.num_steps):
            # The token after the features, which are those of position + step.
            x = self.midlayer(F.pad(embedded[:, 1 + step :], (0, 0, 0, 1 + step)), x, memory)
            rows, positions = batch.ahead(2 + step)
            if not len(rows):
                break
            logits = self.lm_head(self.norm(x[rows, positions]))
            token_ids = batch.ids[rows, positions + 2 + step]
            at = targets.at(rows, positions + 1 + step)
            made.append(Place(rows, positions, logits, at, token_ids))
        return made

    def tokens(self, logits: Tensor) -> Tensor:
        """In the target's vocabulary."""
        top = logits.argmax(-1)
        return top + self.d2t[top]


class Memory:
    """Keys and values of a pass: of the real features, and of one step after another past them."""

    def __init__(self, ids: Tensor) -> None:
        length = ids.shape[1]
        self.keys: list[Tensor] = []  # [rows, heads, length, head_dim] each
        self.values: list[Tensor] = []
        # Added to scores, [length, length].
        self.future = torch.full((length, length), -torch.inf, device=ids.device).triu(1)


class Attention(nn.Module):
    """Causal over the real features; of later steps each position sees its own alone."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.head_dim = config["head_dim"]
        self.theta = config["rope_theta"]
        heads = config["num_attention_heads"]
        kv_heads = config["num_key_value_heads"]
        self.group = heads // kv_heads
        self.q_proj = nn.Linear(2 * size, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, size, bias=False)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """[rows, length, 2 hidden] -> [rows, length, hidden]."""
        step = len(memory.keys)
        parts = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = parts  # [rows, heads, length, head_dim]
        q = self.rotate(q, step)
        k = self.rotate(k, step)
        k, v = (part.repeat_interleave(self.group, dim=1) for part in (k, v))
        memory.keys.append(k)
        memory.values.append(v)
        if step == 0:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = self.attend(q, memory)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, memory: Memory) -> Tensor:
        """The sum over real positions up to the row's, and over its own steps."""
        (real_keys, *keys) = memory.keys
        (real_values, *values) = memory.values
        q = q * self.head_dim**-0.5
        future = memory.future.to(q.dtype)
        length = q.shape[2]
        scores = torch.baddbmm(future, q.flatten(0, 1), real_keys.flatten(0, 1).mT)
        scores = scores.unflatten(0, q.shape[:2])
        matches = [(q * key).sum(-1, keepdim=True) for key in keys]
        weights = torch.cat((scores, *matches), dim=-1).softmax(-1)
        mixed = weights[..., :length] @ real_values
        for i, value in enumerate(values):
            mixed = mixed + weights[..., length + i, None] * value
        return mixed

    def rotate(self, x: Tensor, step: int) -> Tensor:
        """By the position of the features, which each step moves on by one."""
        half = torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim
        positions = torch.arange(x.shape[2], device=x.device) + step
        angles = torch.outer(positions.float(), self.theta**-half)
        cos = angles.cos().to(x.dtype)
        sin = angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Embeddings and features, each normed for itself, are read by the attention."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size = config["hidden_size"]
        eps = config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = MLP(size, config["intermediate_size"])

    def forward(self, embedded: Tensor, features: Tensor, memory: Memory) -> Tensor:
        """[rows, length, hidden] each -> [rows, length, hidden]."""
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), dim=-1)
        x = features + self.self_attn(x, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class Residual(nn.Module):
    """`x + silu(W x)`, some times."""

    def __init__(self, size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class Medusa(Head):
    """A head for each place ahead, all before the target's own output head
    (https://arxiv.org/abs/2401.10774).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        size = config["hidden_size"]
        num_layers = config["num_hidden_layers"]
        self.blocks = nn.ModuleList(Residual(size, num_layers) for _ in range(config["num_heads"]))

    @torch.no_grad()
    def start_from(self, teacher: Teacher) -> None:
        """Each head begins as the target's."""
        for weight in self.parameters():
            weight.zero_()

    def places(self, batch: Batch, teacher: Teacher) -> list[Place]:
        """Each from the target's last hidden state alone."""
        made = []
        targets = Wanted(batch, teacher.logits)
        for i, block in enumerate(self.blocks):
            rows, positions = batch.ahead(2 + i)
            if not len(rows):
                break
            logits = teacher.logits(block(batch.hidden[rows, positions]))
            token_ids = batch.ids[rows, positions + 2 + i]
            at = targets.at(rows, positions + 1 + i)
            made.append(Place(rows, positions, logits, at, token_ids))
        return made


def loss(places: list[Place]) -> Tensor:
    """Weighted mean of the divergences from the target's distribution, in nats."""
    values = [
        F.kl_div(
            place.logits.float().log_softmax(-1),
            place.targets,
            reduction="batchmean",
            log_target=True,
        )
        for place in places
    ]
    weights = [DECAY**i for i in range(len(values))]
    weighted = [weight * value for weight, value in zip(weights, values, strict=True)]
    return torch.stack(weighted).sum() / sum(weights)


@torch.no_grad()
def kept(head: Head, places: list[Place], shape: torch.Size) -> list[float]:
    """For each place the share of rows in which the drafts up to it are what the text says."""
    alive = torch.ones(shape, dtype=torch.bool, device=places[0].rows.device)
    shares = []
    for place in places:
        right = torch.zeros_like(alive)
        right[place.rows, place.positions] = head.tokens(place.logits) == place.token_ids
        alive &= right
        shares.append(alive[place.rows, place.positions].float().mean().item())
    return shares
