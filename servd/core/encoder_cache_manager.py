"""EncoderCacheManager: decides which pictures the workers encode in a step, and which of their
outputs the workers keep.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Self

from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.core.request import Request


class EncoderCacheManager:
    """The encoded pictures of all workers, by identifier: an LRU of up to `capacity` image tokens.

    A picture is encoded in the step that first computes one of its tokens, for all requests with
    the same picture. It stays until such a request has computed all of its tokens, or longer.

    Args:
        capacity: the image tokens of all outputs. A picture must not have more.
        is_bidirectional: the tokens of a picture see each other, so one step computes all of them.
    """

    def __init__(self, capacity: int = 0, is_bidirectional: bool = False) -> None:
        self.capacity = capacity
        self.is_bidirectional = is_bidirectional
        self.num_queries = 0  # pictures that requests needed
        self.num_hits = 0  # of these, pictures that were encoded already
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._holds: list[tuple[Request, int]] = []  # pictures, by index, that requests still read
        self._freed: list[bytes] = []
        self._num_encoded = 0  # image tokens that this step encodes

    @classmethod
    def from_config(cls, config: Config, spec: ModelSpec, max_model_len: int) -> Self:
        """Return a cache of --encoder-cache-memory, and at least of the longest prompt."""
        if isinstance(spec.multimodal, str):
            return cls()
        memory = config.multimodal.encoder_cache_memory or 0
        capacity = max(memory // spec.embed_bytes, max_model_len)
        return cls(capacity, spec.multimodal.is_bidirectional)

    @property
    def num_embeds(self) -> int:
        """The image tokens of all outputs."""
        return sum(self._sizes.values())

    def begin_step(self) -> None:
        """Let go of the pictures whose tokens earlier steps have computed."""
        self._num_encoded = 0
        if self._holds:
            self._holds = [hold for hold in self._holds if _is_read(*hold)]

    def count_ready(self, request: Request, num_tokens: int, room: int) -> tuple[int, list[int]]:
        """Return how many of a request's next `num_tokens` tokens a step can compute, and which of
        its pictures, by index, it must encode for them. The first picture of a step is always
        encoded; others if the step then encodes at most `room` image tokens.
        """
        start = request.num_computed_tokens
        held = {r.mm_features[index].identifier for r, index in self._holds}
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
            has_room = not num_encoded or num_encoded + size <= room
            fits = num_held + size <= self.capacity
            if is_cut or not (fits and (is_encoded or has_room)):
                return max(feature.offset - start, 0), inputs
            held.add(feature.identifier)
            num_held += size
            if not is_encoded and size:
                inputs.append(index)
                num_encoded += size
        return num_tokens, inputs

    def encode(self, request: Request, num_tokens: int, inputs: Iterable[int]) -> int:
        """Schedule `inputs`, and hold all pictures of a request's next `num_tokens` tokens; both
        are from `count_ready`. Return the number of image tokens to encode.
        """
        end = request.num_computed_tokens + num_tokens
        num_before = self._num_encoded
        for index, feature in enumerate(request.mm_features):
            if feature.end <= request.num_computed_tokens or feature.offset >= end:
                continue
            if (request, index) not in self._holds:
                self._holds.append((request, index))
                self.num_queries += 1
                self.num_hits += index not in inputs
            self._sizes[feature.identifier] = feature.num_embeds
            self._sizes.move_to_end(feature.identifier)
        self._num_encoded += sum(request.mm_features[index].num_embeds for index in inputs)
        self._evict()
        return self._num_encoded - num_before

    def forget(self, request: Request) -> None:
        """Drop the pictures of a request that failed: the workers may lack them."""
        for identifier in {feature.identifier for feature in request.mm_features}:
            if self._sizes.pop(identifier, None) is not None:
                self._freed.append(identifier)
        self._holds = [h for h in self._holds if h[0].mm_features[h[1]].identifier in self._sizes]

    def clear(self) -> None:
        """Forget all: the workers are new."""
        self._sizes.clear()
        self._holds.clear()
        self._freed.clear()

    def take_freed(self) -> list[bytes]:
        """Return the identifiers of the outputs that workers drop before the step encodes."""
        freed, self._freed = self._freed, []
        return freed

    def _evict(self) -> None:
        held = {request.mm_features[index].identifier for request, index in self._holds}
        num_embeds = self.num_embeds
        for identifier in [*self._sizes]:
            if num_embeds <= self.capacity:
                return
            if identifier not in held:
                num_embeds -= self._sizes.pop(identifier)
                self._freed.append(identifier)


def _is_read(request: Request, index: int) -> bool:
    feature = request.mm_features[index]
    return request.slot >= 0 and request.num_computed_tokens < feature.end
