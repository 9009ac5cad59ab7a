"""EncoderCacheManager: decides which pictures the workers encode in a step, and which of their
outputs the workers keep.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self
from weakref import WeakValueDictionary

from msgspec.structs import replace

from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.core.request import PictureFile, Request


@dataclass(eq=False)
class EncoderCacheManager:
    """The encoded pictures of all workers, by identifier: an LRU of up to `capacity` image tokens.

    A picture is encoded in the step that first computes one of its tokens, for all requests with
    the same picture. The pictures that a step reads stay until the next step.
    """

    capacity: int = 0  # image tokens of all outputs; a picture must not have more
    is_bidirectional: bool = False  # tokens of a picture see each other: one step computes them
    token_cost: float = 1.0  # see MultiModalSpec

    def __post_init__(self) -> None:
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._held: set[bytes] = set()  # those that this step reads
        self._freed: list[bytes] = []
        self._files = WeakValueDictionary[int, PictureFile]()  # by inode
        self._limit = 0.0  # image tokens of a step
        self._num_encoded = 0  # of this step

    @classmethod
    def from_config(cls, config: Config, spec: ModelSpec, max_model_len: int) -> Self:
        """Return a cache of --encoder-cache-memory."""
        if isinstance(spec.multimodal, str):
            return cls()
        capacity = config.multimodal.encoder_cache_size(max_model_len, spec.embed_bytes)
        return cls(capacity, spec.multimodal.is_bidirectional, spec.multimodal.token_cost)

    def open_pictures(self, request: Request) -> None:
        """Open the pictures of a request, for the workers. Raise OSError if its client has left."""
        features = request.mm_features
        opened = self._files
        request.picture_files = [
            opened.get(f.inode) or opened.setdefault(f.inode, PictureFile(f)) for f in features
        ]
        places = zip(features, request.picture_files, strict=True)
        request.mm_features = [replace(f, memory=file.path) for f, file in places]

    @property
    def num_embeds(self) -> int:
        """The image tokens of all outputs."""
        return sum(self._sizes.values())

    def begin_step(self, limit: int) -> None:
        """Let go of what the last step read. A step encodes its first picture, and others while
        that takes as long as `limit` tokens of the language model; with 0, it encodes none.
        """
        self._limit = limit / self.token_cost
        self._num_encoded = 0
        self._held.clear()

    def can_start(self, request: Request, room: int, is_whole: bool) -> bool:
        """Return whether the step can compute tokens of a new request, wherever it begins; with
        `is_whole`, all of them. `room`: the tokens that it may compute.
        """
        if not request.mm_features:
            return True
        sizes = {feature.identifier: feature.num_embeds for feature in request.mm_features}
        num_new = sum(size for key, size in sizes.items() if key not in self._sizes)
        num_held = sum(self._sizes[key] for key in self._held)
        new_sizes = [size for key, size in sizes.items() if key not in self._held]
        num_read = sum(new_sizes) if is_whole else max(new_sizes, default=0)
        fits = num_held + num_read <= self.capacity
        longest = max(feature.length for feature in request.mm_features)
        is_cut = self.is_bidirectional and longest > room
        return fits and not is_cut and self._has_time(self._num_encoded, num_new)

    def count_ready(self, request: Request, num_tokens: int) -> tuple[int, list[int]]:
        """Return how many of a request's next `num_tokens` tokens the step can compute, and which
        of its pictures, by index, it must encode for them.
        """
        start = request.num_computed_tokens
        held = self._held.copy()
        num_held = sum(self._sizes[identifier] for identifier in held)
        num_encoded = self._num_encoded
        inputs: list[int] = []
        for index, feature in enumerate(request.mm_features):
            if feature.end <= start:
                continue
            if feature.offset >= start + num_tokens:
                break
            is_cut = self.is_bidirectional and feature.end > start + num_tokens
            is_encoded = feature.identifier in self._sizes
            size = 0 if feature.identifier in held else feature.num_embeds
            fits = num_held + size <= self.capacity
            if is_cut or not (fits and (is_encoded or self._has_time(num_encoded, size))):
                return max(feature.offset - start, 0), inputs
            held.add(feature.identifier)
            num_held += size
            if not is_encoded and size:
                inputs.append(index)
                num_encoded += size
        return num_tokens, inputs

    def encode(self, request: Request, num_tokens: int, inputs: Iterable[int]) -> int:
        """Schedule `inputs`, and hold all pictures of a request's next `num_tokens` tokens; both
        are from `count_ready`. Return how many tokens take as long as to encode them.
        """
        end = request.num_computed_tokens + num_tokens
        num_before = self._num_encoded
        for feature in request.mm_features:
            if feature.end <= request.num_computed_tokens or feature.offset >= end:
                continue
            self._held.add(feature.identifier)
            self._sizes[feature.identifier] = feature.num_embeds
            self._sizes.move_to_end(feature.identifier)
        self._num_encoded += sum(request.mm_features[index].num_embeds for index in inputs)
        self._evict()
        return round((self._num_encoded - num_before) * self.token_cost)

    def forget(self, request: Request) -> None:
        """Drop the pictures of a request that failed: the workers may lack them."""
        for identifier in {feature.identifier for feature in request.mm_features}:
            if self._sizes.pop(identifier, None) is not None:
                self._freed.append(identifier)
            self._held.discard(identifier)

    def clear(self) -> None:
        """Forget all: the workers are new."""
        self._sizes.clear()
        self._held.clear()
        self._freed.clear()

    def take_freed(self) -> list[bytes]:
        """Return the identifiers of the outputs that workers drop before the step encodes."""
        freed, self._freed = self._freed, []
        return freed

    def _has_time(self, num_encoded: int, num_new: int) -> bool:
        """Return whether a step that encodes `num_encoded` image tokens can encode `num_new`."""
        is_first = num_encoded == 0 and self._limit > 0
        return not num_new or is_first or num_encoded + num_new <= self._limit

    def _evict(self) -> None:
        num_embeds = self.num_embeds
        for identifier in [*self._sizes]:
            if num_embeds <= self.capacity:
                return
            if identifier not in self._held:
                num_embeds -= self._sizes.pop(identifier)
                self._freed.append(identifier)
