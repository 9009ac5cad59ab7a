"""OLMo 2 (https://arxiv.org/abs/2501.00656): Llama with norms after attention and feed-forward, and
over all queries and all keys.
"""

from collections.abc import Callable

from torch import Tensor, nn

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.attention import ForwardContext
from servd.worker.layers.norm import RMSNorm
from servd.worker.layers.rotary import Rotation
from servd.worker.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer


class Olmo2Attention(LlamaAttention):
    """Llama's attention, with norms over all heads, also over heads of other ranks."""

    def __init__(self, spec: ModelSpec, layer: int, parallel: Parallel) -> None:
        super().__init__(spec, layer, parallel)
        eps = spec.config.get("rms_norm_eps", 1e-6)
        self.parallel = parallel
        self.q_norm = RMSNorm(spec.num_heads * spec.head_dim, eps, parallel)
        self.k_norm = RMSNorm(spec.num_kv_heads * spec.head_dim, eps, parallel)

    def normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k normalized over all heads: [num_tokens, heads * head_dim] each."""
        return self._norm(self.q_norm, q), self._norm(self.k_norm, k)

    def _norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        size = x.shape[1]
        together = self.parallel.all_gather(x)
        num_copies = together.shape[1] // len(norm.weight)  # of each head, on neighbours
        heads = together.unflatten(1, (-1, self.head_dim))[:, ::num_copies]
        # One head of three dimensions: a slice of qkv is normed where it is.
        normed = norm(heads.flatten(1).unsqueeze(1)).squeeze(1)
        return normed.narrow(1, self.parallel.rank // num_copies * size, size)


class Olmo2Layer(LlamaLayer):
    """Llama's layer with norms on the outputs of attention and feed-forward, not the inputs."""

    def __init__(
        self, spec: ModelSpec, norm: Callable[[], RMSNorm], attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__(spec, norm, attention, mlp)
        del self.input_layernorm
        self.post_feedforward_layernorm = norm()

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        add = self.post_attention_layernorm.ops.scale
        stream = x if residual is None else add(x, 1.0, residual)
        x = self.post_attention_layernorm(self.self_attn(stream, rotation, ctx))
        stream = add(x, 1.0, stream)
        return self.post_feedforward_layernorm(self.mlp(stream)), stream


class Olmo2ForCausalLM(LlamaForCausalLM):
    layer_class = Olmo2Layer
    attention_class = Olmo2Attention
