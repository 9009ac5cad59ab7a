"""mtp: the layer that DeepSeek V3 and others were trained with to predict one more token
(https://arxiv.org/abs/2412.19437). It follows the model's own layers in the checkpoint.
"""

from collections.abc import Set
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from servd.base.errors import ConfigError
from servd.checkpoint.model_spec import ModelSpec
from servd.worker.layers.attention import attention_layers
from servd.worker.layers.linear import ReplicatedLinear
from servd.worker.layers.quantized import NamedTensors
from servd.worker.loading.model_loader import tensor_shapes
from servd.worker.models.llama import LlamaForCausalLM
from servd.worker.spec_decode import Target
from servd.worker.spec_decode.eagle import EagleHead, EagleProposer

# Prefixes of names in the checkpoint's layer -> prefixes here; other names are the decoder layer's.
# None: the model has the same tensor.
NAMES = {
    "eh_proj.": "fc.",
    "enorm.": "enorm.",
    "hnorm.": "hnorm.",
    "shared_head.norm.": "norm.",
    "shared_head.head.": None,
    "embed_tokens.": None,
}


def rename(name: str, layer: int) -> str | None:
    """Return servd's name of a checkpoint's tensor; None if shared or not in layer `layer`."""
    _, is_own, leaf = name.partition(f"layers.{layer}.")
    for theirs, ours in NAMES.items():
        if leaf.startswith(theirs):
            return None if ours is None else ours + leaf.removeprefix(theirs)
    return f"layers.0.{leaf}" if is_own else None


class MtpHead(EagleHead):
    """A layer like the target's last layer. Embeddings and features are normed separately, and its
    output features are normed like the target's.
    """

    def __init__(self, spec: ModelSpec, names: Set[str], target: Target) -> None:
        super().__init__(spec, names, target)
        model: Any = target.model
        self.rotary = model.model.rotary

    def make_layers(self, spec: ModelSpec, names: Set[str], target: Target) -> None:
        model: Any = target.model
        size = spec.hidden_size
        parallel = target.parallel
        norm = type(model.model.norm)
        self.fc = ReplicatedLinear(2 * size, size, parallel, bias=False)
        eps = model.model.norm.eps
        self.enorm, self.hnorm, self.norm = (norm(size, eps, parallel) for _ in range(3))
        self.number = spec.num_layers
        self.layers = nn.ModuleList([model.make_layer(spec, self.number, parallel)])
        for layer in attention_layers(self):
            layer.layer = 0  # number in the head's own cache

    def convert(self, tensors: NamedTensors) -> NamedTensors:
        for name, tensor in tensors:
            if (renamed := rename(name, self.number)) is None:
                continue
            prefix, is_attention, leaf = renamed.partition(".self_attn.")
            convert = getattr(self.layers[0].self_attn, "convert", None)
            if not is_attention or convert is None:
                yield renamed, tensor
                continue
            for part, of_part in convert(leaf, tensor):
                yield f"{prefix}.self_attn.{part}", of_part

    def enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.fc(torch.cat((self.enorm(embedded), self.hnorm(features)), dim=-1)), None

    def leave(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm.add(x, residual)[0]


class MtpProposer(EagleProposer):
    """EAGLE with an MTP head, from the model's folder unless another folder is named."""

    head_class: ClassVar[type[EagleHead]] = MtpHead
    rename = staticmethod(str)

    def find_folder(self, target: Target) -> str:
        if not isinstance(target.model, LlamaForCausalLM):
            raise ConfigError(
                f"--speculative-config: {target.spec.model_type} does not support method mtp; "
                "leave it out"
            )
        return target.spec.folder if self.config.model is None else super().find_folder(target)

    def find_names(self, folder: str) -> set[str]:
        names = {rename(name, self.spec.num_layers) for name in tensor_shapes(folder)}
        return {name for name in names if name is not None}

    def check(self, names: Set[str]) -> None:
        super().check(names)
        if not names:
            raise ConfigError(
                f"--speculative-config: {self.spec.folder} has no MTP layer (number "
                f"{self.spec.num_layers}) after the model's layers; leave method mtp out"
            )
