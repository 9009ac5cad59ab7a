"""eagle3: EAGLE with features of several layers (https://arxiv.org/abs/2503.01840)."""

from collections.abc import Set
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import ModelSpec
from servd.config.speculative import SpeculativeConfig
from servd.worker.batch.input_batch import InputBatch
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.linear import ReplicatedLinear
from servd.worker.layers.norm import RMSNorm
from servd.worker.layers.rotary import Rotation
from servd.worker.layers.weight import Weight
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer, LlamaMLP
from servd.worker.ops import native
from servd.worker.spec_decode import Target
from servd.worker.spec_decode.eagle import EagleHead, EagleProposer


class AuxHiddenStates:
    """Keeps the residual stream that enters some layers, at the same address in every step, because
    recorded graphs write there too. `target`: its model has one list of layers; each layer takes
    the term to add to the stream, then the stream. `layers`: the numbers of these layers.
    """

    def __init__(self, target: Target, layers: list[int]) -> None:
        spec = target.backend.spec
        scheduler = target.config.scheduler
        assert scheduler.max_num_batched_tokens is not None
        shape = len(layers), scheduler.max_num_batched_tokens, target.spec.hidden_size
        self.streams = torch.empty(shape, dtype=spec.dtype, device=spec.device)
        self.is_native = spec.device.type == "cpu" and native.library() is not None
        self.is_read = True  # whether this step's streams are needed
        parts = (part for _, part in target.model.named_modules())
        blocks = next(part for part in parts if isinstance(part, nn.ModuleList))
        for stream, layer in zip(self.streams, layers, strict=True):
            blocks[layer].register_forward_pre_hook(partial(self._keep, stream))

    def _keep(self, stream: Tensor, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.is_read:
            return
        x, residual = args[:2]
        out = stream[: len(x)]
        if self.is_native:
            native.add(x, residual, out)
        else:
            torch.add(x, residual, out=out)

    def of_step(self, num_tokens: int) -> Tensor:
        """Return the streams [num_tokens, layers * hidden], valid until the next step."""
        if self.is_native:
            return torch.from_numpy(np.concatenate(self.streams.numpy()[:, :num_tokens], axis=-1))
        return torch.cat(self.streams[:, :num_tokens].unbind(), dim=-1)


class Eagle3Attention(LlamaAttention):
    def __init__(self, spec: ModelSpec, layer: int, parallel: Parallel) -> None:
        super().__init__(spec, layer, parallel)
        bias, _ = self.biases(spec.config)
        self.qkv_proj = self.qkv(2 * spec.hidden_size, spec, parallel, bias=bias)


class Eagle3Layer(LlamaLayer):
    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        norm = partial(LlamaForCausalLM.make_norm, spec, parallel)
        super().__init__(spec, norm, Eagle3Attention(spec, 0, parallel), LlamaMLP(spec, parallel))
        self.hidden_norm = norm()
        self.norm_before_residual = spec.config.get("norm_before_residual", False)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Compute a layer. `x` are the embeddings; the stream begins with the features."""
        assert residual is not None
        normed = self.hidden_norm(residual)
        if self.norm_before_residual:
            residual = normed
        x = self.self_attn(torch.cat((self.input_layernorm(x), normed), dim=-1), rotation, ctx)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Eagle3Head(EagleHead):
    """A head whose input features are `fc` of several layers' hidden states. Its output features
    are its hidden states before the last norm.
    """

    def make_layers(self, spec: ModelSpec, names: Set[str], target: Target) -> None:
        size = spec.hidden_size
        parallel = target.parallel
        config = spec.config
        eps = config.get("rms_norm_eps", 1e-6)
        self.aux: AuxHiddenStates | None = None
        if "fc.weight" in names:
            layers = aux_layers(spec, target)
            aux_size = len(layers) * target.spec.hidden_size
            self.aux = AuxHiddenStates(target, layers)
            self.num_read = aux_size
            self.fc = ReplicatedLinear(aux_size, size, parallel, bias="fc.bias" in names)
            if "input_norm.weight" in names:
                self.input_norm = RMSNorm(aux_size, eps, parallel)
            self.fc_norm = nn.ModuleList(
                RMSNorm(target.spec.hidden_size, eps, parallel)
                for layer in range(len(layers))
                if f"fc_norm.{layer}.weight" in names
            )
        self.layers = nn.ModuleList([Eagle3Layer(spec, parallel)])
        for layer in range(1, spec.num_layers):
            self.layers.append(LlamaForCausalLM.make_layer(spec, layer, parallel))
        self.norm = RMSNorm(size, eps, parallel)
        self.norm_output = config.get("norm_output", False)
        self.d2t: Weight | None = None
        if "d2t" in names:
            self.d2t = Weight((config["draft_vocab_size"],), parallel)
            self.d2t.data = torch.zeros(self.d2t.shape, dtype=torch.int64)
        self.token_map: Tensor | None = None  # int64 [draft vocab]: from `d2t`, once it is loaded
        self.is_native = native.library() is not None and target.backend.spec.device.type == "cpu"

    def read(self, hidden: Tensor) -> Tensor:
        """Return several layers' hidden states, concatenated."""
        return hidden if self.aux is None else self.aux.of_step(len(hidden))

    def features(self, read: Tensor) -> Tensor:
        if self.aux is None:
            return read
        x = read
        if hasattr(self, "input_norm"):
            x = self.input_norm(x)
        if self.fc_norm:
            pairs = zip(self.fc_norm, x.chunk(len(self.fc_norm), dim=-1), strict=True)
            x = torch.cat([norm(part.contiguous()) for norm, part in pairs], dim=-1)
        return self.fc(x)

    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        return embedded, features

    def forward(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, ctx: ForwardContext
    ) -> Tensor:
        features = super().forward(token_ids, features, positions, ctx)
        return self.norm(features) if self.norm_output else features

    def top(self, features: Tensor) -> Tensor:
        """Return the top tokens, mapped from the head's own vocabulary if it has one."""
        top = super().top(features if self.norm_output else self.norm(features))
        if self.token_map is None:
            return top
        return native.look_up(top, self.token_map) if self.is_native else self.token_map[top]


def aux_layers(spec: ModelSpec, target: Target) -> list[int]:
    """Return the target's layers whose inputs are read. Without a list in config.json: an early, a
    middle and a late layer. Raises ConfigError if the target lacks such layers.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    num_layers = target.spec.num_layers
    layers = spec.config.get(key) or spec.config.get("eagle_config", {}).get(key)
    layers = layers or [2, num_layers // 2, num_layers - 3]
    if not all(0 < layer < num_layers for layer in layers):
        raise ConfigError(
            f"--speculative-config: {spec.folder} reads the inputs of layers "
            f"{', '.join(map(str, layers))}, but the model has {num_layers} layers; use a head "
            "of this model"
        )
    return layers


class Eagle3Proposer(EagleProposer):
    head_class: ClassVar[type[EagleHead]] = Eagle3Head
    head: Eagle3Head

    def __init__(self, config: SpeculativeConfig, target: Target) -> None:
        super().__init__(config, target)
        draft_vocab_size = self.spec.config.get("draft_vocab_size") or 0
        self.check_token_map(self.head.d2t, draft_vocab_size, is_relative=True)
        if (d2t := self.head.d2t) is not None and not d2t.is_meta:
            self.head.token_map = d2t.data + torch.arange(len(d2t), device=d2t.device)

    @property
    def is_reading(self) -> bool:
        """Whether layers' hidden states are kept: not in plain steps on a CPU."""
        aux = self.head.aux
        return aux is not None and aux.is_read

    def begin_step(self, batch: InputBatch) -> None:
        if (aux := self.head.aux) is not None:
            aux.is_read = not (aux.is_native and batch.is_plain)

    def check(self, names: Set[str]) -> None:
        """Check sizes. With its own embedding, the head's hidden states may differ in size."""
        if "embed_tokens.weight" not in names:
            super().check(names)
            return
        size = self.spec.vocab_size
        self.check_size("tokens in the vocabulary", size, self.target.spec.vocab_size)
