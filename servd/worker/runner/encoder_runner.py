"""EncoderRunner: encodes the pictures of requests by the model's vision tower, and adds to each
step the embeddings and positions of their tokens.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from servd.base.errors import ConfigError, InvalidRequest, UnsupportedModel
from servd.base.plugins import load_class
from servd.base.tracing import now_ns
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.multimodal_config import MultiModalSpec, text_name
from servd.checkpoint.weight_files import find_weight_files
from servd.config import Config
from servd.messages.engine import ModelRunnerOutput, NewRequest, SchedulerOutput
from servd.messages.multimodal import MultiModalFeature
from servd.worker.attention import AttentionBackend
from servd.worker.attention.torch_sdpa import TorchSdpaBackend
from servd.worker.batch.input_batch import InputBatch
from servd.worker.batch.request_states import RequestStates
from servd.worker.device.device import upload
from servd.worker.device.parallel import Parallel
from servd.worker.layers.image_embeddings import ImageEmbeddings
from servd.worker.loading.model_loader import Model
from servd.worker.ops import target
from servd.worker.quantization._files import read_tensors

if TYPE_CHECKING:
    from servd.worker.multimodal._tower import VisionTower

log = logging.getLogger("servd.worker")


@dataclass(frozen=True)
class Pictures:
    """The pictures of a request."""

    features: Sequence[MultiModalFeature]
    columns: Sequence[np.ndarray]  # int64 [num_embeds] each: the image tokens, as prompt indices
    positions: np.ndarray | None  # int64 [3, end], with M-RoPE: of the tokens up to the last range


@dataclass(frozen=True)
class EncodeTime:
    """A StepPart: how long the vision tower ran."""

    begin: int | torch.cuda.Event  # nanoseconds
    end: int | torch.cuda.Event

    def to_host(self) -> Self:
        return self

    def write(self, output: ModelRunnerOutput) -> None:
        match self.begin, self.end:
            case int(begin), int(end):
                output.encode_ns = end - begin
            case torch.cuda.Event() as begin, torch.cuda.Event() as end:
                end.synchronize()
                output.encode_ns = round(begin.elapsed_time(end) * 1e6)


class EncoderRunner:
    """Keeps the pictures of requests that have not passed them, and the tower's outputs.

    Args:
        model: see `check_model`.
        dtype: of the tower's weights.
        options: --mm-processor-kwargs, which are checked here: the media process starts later.
        parallel: the tower is in the first stage, as a whole on every rank.
        failed: slot -> error of its request, to which those of pictures are added.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        options: Mapping[str, Any],
        model: Any,
        states: RequestStates,
        backend: AttentionBackend[Any],
        parallel: Parallel,
        failed: dict[int, str],
    ) -> None:
        assert isinstance(spec.multimodal, MultiModalSpec)
        self.factor: float = model.image_factor
        self.dtype = dtype
        self.spec = spec
        self.multimodal = spec.multimodal
        self.states = states
        self.parallel = parallel
        self.failed = failed
        self.device = states.token_ids.device
        # While the tower runs; the CPU's runner changes it for each step, and says why.
        self.num_threads = 1 if target.runs_native(self.device) else torch.get_num_threads()
        self.stream = torch.cuda.Stream(self.device) if states.token_ids.is_cuda else None
        self.tower: VisionTower | None = None
        self.nbytes = 0
        if parallel.stage == 0:
            self._load_tower(options)
        # Steps with bidirectional rows compute attention by this backend; None: by the model's.
        self.backend: AttentionBackend[Any] | None = None
        if self.multimodal.is_bidirectional and not backend.supports_bidirectional_rows:
            self.backend = TorchSdpaBackend(backend.spec)
            assert self.backend.kv_cache_shape(1) == backend.kv_cache_shape(1)
        if self.multimodal.mrope_section:
            states.rotary_shifts = torch.zeros(
                len(states.token_ids), dtype=torch.int64, device=self.device
            )
        self.requests: dict[int, Pictures] = {}  # by slot
        self.outputs: dict[bytes, Tensor] = {}  # identifier -> [num_embeds, embed_size]
        self._times: list[EncodeTime] = []  # of the step

    def _load_tower(self, options: Mapping[str, Any]) -> None:
        if torch.empty(0).is_meta:  # a dry run, in which sizes are all that is wanted
            files = find_weight_files(Path(self.spec.folder))
            tensors = read_tensors(files, lambda name: text_name(name) is None)
            widest = self.dtype.itemsize
            self.nbytes = sum(x.numel() * min(x.itemsize, widest) for _, x in tensors)
            return
        # The package needs Pillow, which text models do without.
        from servd.worker.multimodal import FAMILIES, ImageProcessor
        from servd.worker.multimodal._tower import VisionTower

        name = self.multimodal.processor
        processor_class: type[ImageProcessor] = load_class(FAMILIES, name, ImageProcessor)
        self.processor = processor_class(Path(self.spec.folder), options)
        self.tower = VisionTower.load(self.spec, self.dtype, self.device)
        self.nbytes = self.tower.nbytes

    def max_cache_bytes(self, config: Config) -> int:
        """Return the most bytes of outputs that the engine keeps; see EncoderCacheManager."""
        return self._max_embeds(config) * self.spec.embed_size * self.dtype.itemsize

    @torch.inference_mode()
    def encode_largest(self, config: Config) -> None:
        """Encode as large a picture, or part of one, as a step may have: a profile of memory."""
        if self.tower is not None:
            tensors = self.processor.process_largest(self._max_embeds(config))
            with torch.cuda.stream(self.stream):
                self.tower.encode({name: torch.from_numpy(x) for name, x in tensors.items()})

    def _max_embeds(self, config: Config) -> int:
        max_model_len = config.model.max_model_len or self.spec.max_position_embeddings
        return config.multimodal.encoder_cache_size(max_model_len, self.spec.embed_bytes)

    def add(self, request: NewRequest) -> None:
        """Keep the pictures of a request. Raises InvalidRequest if their ranges do not fit."""
        if not request.mm_features:
            return
        token_ids = np.asarray(request.token_ids[: request.num_prompt_tokens])
        is_image = token_ids == self.multimodal.image_token_id
        columns = [
            f.offset + np.flatnonzero(is_image[f.offset : f.end]) for f in request.mm_features
        ]
        for feature, of_feature in zip(request.mm_features, columns, strict=True):
            if len(of_feature) != feature.num_embeds:
                raise InvalidRequest(
                    f"a picture has {feature.num_embeds} embeddings for {len(of_feature)} tokens"
                )
        positions = None
        if self.multimodal.mrope_section:
            positions, shift = mrope_positions(request.mm_features)
            self.states.shift(request.slot, shift)
        self.requests[request.slot] = Pictures(request.mm_features, columns, positions)

    def remove(self, slot: int) -> None:
        self.requests.pop(slot, None)
        self.states.shift(slot, 0)

    @torch.inference_mode()
    def encode(self, scheduled: SchedulerOutput) -> None:
        """Drop outputs and encode pictures. A request whose picture cannot be encoded fails."""
        for identifier in scheduled.freed_encoder_outputs:
            self.outputs.pop(identifier, None)
        if scheduled.scheduled_encoder_inputs:
            begin = self._clock()
            self._encode_all(scheduled)
            self._times = [EncodeTime(begin, self._clock())]

    def take_times(self) -> list[EncodeTime]:
        """Return when the tower began and ended, if the step encodes pictures."""
        times, self._times = self._times, []
        return times

    def _clock(self) -> int | torch.cuda.Event:
        if self.stream is None:
            return now_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def _encode_all(self, scheduled: SchedulerOutput) -> None:
        for slot, index in scheduled.scheduled_encoder_inputs:
            if (pictures := self.requests.get(slot)) is None:  # the request has failed
                continue
            feature = pictures.features[index]
            try:
                tensors = map_tensors(feature)  # on all stages, as the last one reports errors
                if self.tower is not None:
                    self.outputs[feature.identifier] = self._encode(feature, tensors)
            except Exception as error:
                if self.parallel.num_stages > 1 and not isinstance(error, OSError | ValueError):
                    raise
                log.error("cannot encode a picture of slot %d", slot, exc_info=error)
                self.failed[slot] = f"the worker failed on a picture ({type(error).__name__})"

    def _encode(self, feature: MultiModalFeature, tensors: Mapping[str, Tensor]) -> Tensor:
        assert self.tower is not None
        torch.set_num_threads(self.num_threads)
        with torch.cuda.stream(self.stream):
            output = self.tower.encode(tensors)
            if self.factor != 1.0:
                output[:, : self.spec.hidden_size] *= self.factor
        shape = (feature.num_embeds, self.spec.embed_size)
        if output.shape != shape:
            raise RuntimeError(f"the tower returned {list(output.shape)}, expected {list(shape)}")
        if self.stream is not None:
            output.record_stream(torch.cuda.current_stream(self.device))
        return output

    def add_images(self, batch: InputBatch) -> InputBatch:
        """Return the batch with the embeddings and positions of its tokens of pictures, to be run
        without a graph; the batch itself if it has none.
        """
        tokens: list[np.ndarray] = []
        features: list[Tensor] = []
        spans: list[tuple[int, int]] = []  # of tokens that see each other
        positions: list[tuple[int, np.ndarray]] = []  # with the index of the first token
        for slot, start, first, stop in self._find_rows(batch):
            pictures = self.requests[slot]
            if pictures.positions is not None:
                positions.append((start, pictures.positions[:, first:stop]))
            for feature, columns in zip(pictures.features, pictures.columns, strict=True):
                low, high = np.searchsorted(columns, (first, stop))
                if low == high:
                    continue
                of_image = columns[low:high] - first + start
                if self.multimodal.is_bidirectional:  # those of a crop, not of all crops
                    crops = np.split(of_image, np.flatnonzero(np.diff(of_image) > 1) + 1)
                    spans += [(crop[0], crop[-1] + 1) for crop in crops]
                if (output := self.outputs.get(feature.identifier)) is not None:
                    tokens.append(of_image)
                    features.append(output[low:high])
                elif self.tower is not None:
                    self.failed.setdefault(slot, "a picture of the request is not encoded")
        if not (tokens or spans or positions):
            return batch
        batch = batch.part(0, len(batch.rows))  # its inputs are complete without a graph
        if positions:
            batch = replace(batch, image_positions=self._place(positions, batch.rotary_positions))
        if tokens:
            batch = replace(batch, images=self._embeddings(tokens, features))
        if spans:
            rows = batch.attention_rows.with_images(spans, self.device)
            batch = replace(batch, attention_rows=rows)
        return batch

    def _find_rows(self, batch: InputBatch) -> Iterator[tuple[int, int, int, int]]:
        """Yield slot, index of the first token in the step, and first and last column + 1 of each
        row that has not passed its pictures. Forget the pictures of others.
        """
        ends = np.cumsum(batch.query_lens)
        for index in np.flatnonzero(np.isin(batch.host_slots, [*self.requests])):
            row = batch.rows[index]
            slot = int(row["slot"])
            first = int(row["num_computed_tokens"])
            query_len = int(row["num_tokens"])
            if first < self.requests[slot].features[-1].end:
                yield slot, int(ends[index]) - query_len, first, first + query_len
            else:
                del self.requests[slot]

    def _place(self, positions: list[tuple[int, np.ndarray]], plain: Tensor) -> Tensor:
        """Return positions of a step's tokens, int64 [3, num_tokens]: those of rows, int64 [3, n],
        with the index of the first token; `plain`, int64 [num_tokens], of the other tokens.
        """
        placed = plain.expand(3, -1).clone()
        for start, of_row in positions:
            placed[:, start : start + of_row.shape[1]] = upload(of_row, self.device)
        return placed

    def _embeddings(self, tokens: list[np.ndarray], features: list[Tensor]) -> ImageEmbeddings:
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return ImageEmbeddings(upload(np.concatenate(tokens), self.device), torch.cat(features))


def map_tensors(feature: MultiModalFeature) -> dict[str, Tensor]:
    """Return a picture's tensors in shared memory, which stays mapped as long as they are used.
    Raises OSError if the memory is gone, ValueError if it lacks a tensor.
    """
    with open(feature.memory, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors: dict[str, Tensor] = {}
    for place in feature.tensors:
        count = prod(place.shape)
        dtype = getattr(torch, place.dtype)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=place.offset)
        tensors[place.name] = flat.view(place.shape)
    return tensors


def mrope_positions(features: Sequence[MultiModalFeature]) -> tuple[np.ndarray, int]:
    """Return time, row and column of a prompt's tokens up to the end of its last picture, int64 [3,
    end], and the shift of the tokens after it. Raises InvalidRequest if a grid does not fit.

    Tokens of text count on all axes. A picture stands still in time; the text after it begins after
    its longer side.
    """
    parts: list[np.ndarray] = []
    position = 0
    end = 0
    for feature in features:
        num_rows, num_columns = feature.grid
        if num_rows * num_columns != feature.length:
            raise InvalidRequest(f"a picture of {feature.grid} has {feature.length} tokens")
        text = np.arange(position, position + feature.offset - end)
        parts.append(np.stack((text, text, text)))
        position += len(text)
        tokens = np.arange(feature.length)
        rows = tokens // num_columns
        columns = tokens % num_columns
        parts.append(position + np.stack((np.zeros_like(tokens), rows, columns)))
        position += max(num_rows, num_columns)
        end = feature.end
    return np.concatenate(parts, axis=1), position - end


def check_model(spec: ModelSpec, model: Model, parallel: Parallel) -> None:
    """Raise UnsupportedModel or ConfigError if a model cannot read its pictures here."""
    if not hasattr(model, "image_factor"):
        raise UnsupportedModel(
            f"servd's {type(model).__name__} reads no pictures: add --language-model-only"
        )
    assert isinstance(spec.multimodal, MultiModalSpec)
    num_layers = len(parallel.own_layers(spec.num_layers))
    if parallel.stage == 0 and spec.multimodal.num_deepstack > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {parallel.num_stages}: the first stage has {num_layers} "
            f"layers, but pictures enter {spec.multimodal.num_deepstack}: use fewer stages"
        )


def reads_images(config: Config, spec: ModelSpec) -> bool:
    """Return whether the worker has an EncoderRunner. Dummy weights are the language model's."""
    is_whole = not config.multimodal.language_model_only and config.model.load_format != "dummy"
    return is_whole and isinstance(spec.multimodal, MultiModalSpec)
