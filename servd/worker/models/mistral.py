"""Mistral 7B (https://arxiv.org/abs/2310.06825): Llama with an optional sliding window."""

from __future__ import annotations

from servd.hf import ModelSpec
from servd.worker.models.llama import LlamaForCausalLM
from servd.worker.parallel import Parallel


class MistralForCausalLM(LlamaForCausalLM):
    """The window, if config.json has one, is the same in all layers."""

    def __init__(self, spec: ModelSpec, parallel: Parallel) -> None:
        super().__init__(spec, parallel)
        self.sliding_window = spec.config.get("sliding_window", 4096)  # null means none
