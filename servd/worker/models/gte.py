"""GTE's own encoders (https://arxiv.org/abs/2407.19669), English v1.5 and multilingual: BERT with
rotary positions and a gated feed-forward.
"""

from collections.abc import Iterator
from typing import ClassVar

from msgspec.structs import replace
from torch import Tensor

from servd.checkpoint.model_spec import ModelSpec
from servd.worker.device.parallel import Parallel
from servd.worker.layers.activation import Gate
from servd.worker.layers.linear import ColumnParallelLinear
from servd.worker.layers.rotary import Rotary, Rotation
from servd.worker.models.bert import BertForSequenceClassification, BertLayer, BertModel


class GteLayer(BertLayer):
    """BERT's layer with a gated feed-forward."""

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__(spec, parallel)
        inner = spec.config["intermediate_size"]
        self.up = ColumnParallelLinear(spec.hidden_size, [inner, inner], parallel, bias=False)
        self.act = Gate(spec.config.get("hidden_act", "gelu"))


class GteModel(BertModel):
    """GTE's encoder. Checkpoints have the names of Alibaba's code or of transformers."""

    layer = GteLayer
    names: ClassVar[dict[str, str]] = {
        "new.": "",
        "gte.": "",
        "encoder.layer.": "layers.",
        "self_attn.": "attention.",
        "attention.qkv_proj": "attention.qkv",
        "attention.o_proj": "attention.dense",
        "attn_ln": "attention_norm",
        "post_attention_layernorm": "attention_norm",
        "post_mlp_layernorm": "mlp_norm",
        "mlp_ln": "mlp_norm",
        "mlp.down_proj": "down",
        "mlp.": "",
    }
    packed: ClassVar[dict[str, tuple[str, int]]] = {
        "q_proj": ("qkv", 0),
        "k_proj": ("qkv", 1),
        "v_proj": ("qkv", 2),
        "gate_proj": ("up", 0),
        "up_proj": ("up", 1),
    }

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__(spec, parallel)
        self.rotary = Rotary(replace(spec, config={"rope_theta": 160000.0} | spec.config))

    @staticmethod
    def first_position(spec: ModelSpec) -> None:
        """Return None: there is no position table."""

    def rotation(self, positions: Tensor) -> Rotation:
        return self.rotary(positions)

    def convert(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors renamed. Alibaba's checkpoints have the gated half before the gate."""
        for name, tensor in super().convert(tensors):
            if "up_gate_proj" not in name:
                yield name, tensor
                continue
            for part, half in zip(("up_proj", "gate_proj"), tensor.chunk(2), strict=True):
                yield name.replace("up_gate_proj", part), half


GteForMaskedLM = GteModel  # embeds without its head


class GteForSequenceClassification(BertForSequenceClassification):
    encoder_class = GteModel
