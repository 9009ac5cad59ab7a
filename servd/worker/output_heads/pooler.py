"""Pooler: a vector or a classification per prompt, or a vector per token of the prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from servd.base.errors import ModelNotFound, UnsupportedModel
from servd.checkpoint import pooling
from servd.checkpoint.config_json import read_json
from servd.messages.engine import ModelRunnerOutput, NewRequest
from servd.messages.params import PoolingParams
from servd.worker.batch.input_batch import InputBatch
from servd.worker.output_heads import OutputHead


class Pooler(OutputHead):
    """Pools the hidden states of a prompt. Between chunks it keeps the sum for a mean, the first
    token's state, and all chunks for a vector per token.
    """

    def __post_init__(self) -> None:
        device = self.states.token_ids.device
        files = pooling.read(self.spec)
        self.size = files.size
        self.score_tokens = files.score_tokens
        self.dense = [PoolerDense.read(folder, device) for folder in files.dense]
        self.params: dict[int, PoolingParams] = {}  # by slot
        self.sums: dict[int, Tensor] = {}  # by slot: [hidden] float32
        self.firsts: dict[int, Tensor] = {}  # by slot: the first token's [hidden]
        # Chunks of "all" so far, by slot: [chunk, hidden] each. On the host, because the device's
        # memory is fully allocated.
        self.chunks: dict[int, list[Tensor]] = {}

    def add(self, request: NewRequest) -> None:
        if not isinstance(request.params, PoolingParams):
            return
        is_all = request.params.pooling == "all"
        request.params.validate(self.spec.hidden_size if is_all else self.size)
        self.params[request.slot] = request.params
        if (start := request.params.second_text) > 0:
            second = self.states.token_ids[request.slot, start : len(request.token_ids)]
            second.bitwise_or_(pooling.SECOND_TEXT)
        if request.params.pooling in (None, "last"):
            return
        assert request.num_computed_tokens == 0, "every token's hidden state is needed"
        if request.params.pooling == "all":
            self.chunks[request.slot] = []

    def remove(self, slot: int) -> None:
        self.params.pop(slot, None)
        self.chunks.pop(slot, None)
        self.sums.pop(slot, None)
        self.firsts.pop(slot, None)

    def read(self, hidden: Tensor, batch: InputBatch) -> Pooled | None:
        """Return vectors of the prompts that end in this step. `hidden`: [num_tokens, hidden]."""
        if not self.params:
            return None
        pooled = Pooled({}, {}, torch.empty(0))
        vectors: list[Tensor] = []
        ends = np.cumsum(batch.query_lens)
        starts = ends - batch.query_lens
        is_last = np.isin(np.arange(len(ends)), batch.sample_rows)
        for row, slot in enumerate(batch.host_slots.tolist()):
            p = self.params.get(slot)
            if p is None:
                continue
            chunk = hidden[starts[row] : ends[row]]
            if p.pooling == "all":
                self.chunks[slot].append(chunk.to("cpu", torch.float32, copy=True))
            elif p.pooling == "cls":
                self.firsts.setdefault(slot, chunk[0].clone())
            elif p.pooling == "mean":
                total = chunk.sum(dim=0, dtype=torch.float32)
                self.sums[slot] = self.sums[slot] + total if slot in self.sums else total
            if not is_last[row]:
                continue
            if p.pooling == "all":
                pooled.by_token[row] = p, torch.cat(self.chunks[slot])
            else:
                vectors.append(self._vector(slot, p, chunk, int(batch.seq_lens[row])))
                pooled.params[row] = p
        if vectors:
            return replace(pooled, vectors=self._finish(torch.stack(vectors), pooled, hidden.dtype))
        return pooled if pooled.by_token else None

    def _vector(self, slot: int, params: PoolingParams, chunk: Tensor, num_tokens: int) -> Tensor:
        """Return the vector [hidden], float32, of a prompt whose last chunk is [chunk, hidden]."""
        if params.pooling == "mean":
            return self.sums[slot] / num_tokens
        return (self.firsts[slot] if params.pooling == "cls" else chunk[-1]).float()

    def _finish(self, vectors: Tensor, pooled: Pooled, dtype: torch.dtype) -> Tensor:
        """Apply the layers after pooling, [n, hidden] -> [n, size]: the layers for embeddings, or
        the layers for a classification.
        """
        if any(params.task == "classify" for params in pooled.params.values()):
            logits = self.compute_logits(vectors.to(dtype)).float()
            return score_of(logits, self.score_tokens) if self.score_tokens else logits
        for layer in self.dense:
            vectors = layer(vectors)
        return vectors


def score_of(logits: Tensor, tokens: list[int]) -> Tensor:
    """Return scores [n, 1] from logits [n, vocab]."""
    score, *negative_scores = logits[:, tokens].split(1, dim=1)
    return score - negative_scores[0] if negative_scores else score


@dataclass(frozen=True)
class PoolerDense:
    """A dense layer between pooling and normalization, in float32."""

    weight: Tensor  # [out, in]
    bias: Tensor | None
    activation: nn.Module

    @classmethod
    def read(cls, folder: str, device: torch.device) -> PoolerDense:
        """Read a layer of sentence-transformers from `folder`. Raises ModelNotFound: a file is
        missing or broken; UnsupportedModel: the activation is not one of torch, or the tensors are
        not those that the configuration states.
        """
        config = read_json(Path(folder) / "config.json")
        file = Path(folder) / "model.safetensors"
        path = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        name = path.rpartition(".")[2]
        if not path.startswith("torch.nn.modules.") or not hasattr(nn, name):
            raise UnsupportedModel(f"{folder}/config.json: activation {path} is not supported")
        try:
            tensors = {key: tensor.float().to(device) for key, tensor in load_file(file).items()}
            sizes = config["in_features"], config["out_features"]
            linear = nn.Linear(*sizes, config.get("bias", True), "meta")
            expected = {f"linear.{key}": tensor.shape for key, tensor in linear.named_parameters()}
            if (shapes := {key: tensor.shape for key, tensor in tensors.items()}) != expected:
                raise UnsupportedModel(f"{file} has {shapes}, but config.json states {expected}")
            return cls(tensors["linear.weight"], tensors.get("linear.bias"), getattr(nn, name)())
        except TypeError as error:
            raise UnsupportedModel(f"{folder}/config.json: activation {path}: {error}") from None
        except (OSError, KeyError, SafetensorError) as error:
            raise ModelNotFound(f"{file} cannot be read: {error}") from None

    def __call__(self, vectors: Tensor) -> Tensor:  # [n, in] -> [n, out]
        return self.activation(F.linear(vectors, self.weight, self.bias))


@dataclass(frozen=True, slots=True)
class Pooled:
    # Row of the step -> [num_prompt_tokens, hidden].
    by_token: dict[int, tuple[PoolingParams, Tensor]]
    params: dict[int, PoolingParams]  # row of the step -> params for its row of `vectors`
    vectors: Tensor  # [n, size] float32

    def to_host(self) -> Pooled:
        return replace(self, vectors=self.vectors.to("cpu", non_blocking=True))

    def write(self, output: ModelRunnerOutput) -> None:
        pooled = {
            row: (p, vector[None])
            for (row, p), vector in zip(self.params.items(), self.vectors, strict=True)
        }
        for row, (params, vectors) in (pooled | self.by_token).items():
            vectors = vectors[:, : params.dimensions].numpy()
            if params.normalize is not False:
                norms = np.linalg.norm(vectors, axis=1, keepdims=True)
                vectors = vectors / np.maximum(norms, 1e-12)
            output.pooled[row] = vectors.astype("<f4").tobytes()
