"""Placeholders: where the pictures of a chat are in its prompt."""

from collections.abc import Sequence
from hashlib import sha256
from math import prod

from servd.api.engine.media_loader import LoadedPicture
from servd.base.errors import InvalidRequest
from servd.messages.multimodal import MultiModalFeature, TensorPlace


def expand(text: str, pictures: Sequence[LoadedPicture]) -> str:
    """Return a rendered chat, or its beginning, with the text of each picture in the place that the
    template left for it. Raise InvalidRequest if it has more places than pictures.
    """
    if not pictures:
        return text
    placeholder = pictures[0].placeholder
    first, *pieces = text.split(placeholder)
    if len(pieces) > len(pictures):
        raise _wrong_number(placeholder, len(pieces), len(pictures))
    between = zip(pictures, pieces, strict=False)  # a beginning has fewer
    return first + "".join([picture.text + piece for picture, piece in between])


def place(
    token_ids: Sequence[int], pictures: Sequence[LoadedPicture], image_token_id: int
) -> list[MultiModalFeature]:
    """Return the pictures, or their parts, with their ranges in a prompt. Each range is from the
    first to the last of its image tokens. Raise InvalidRequest if the prompt does not have as many
    as the pictures.
    """
    if not pictures:
        return []
    places = [index for index, token_id in enumerate(token_ids) if token_id == image_token_id]
    num_embeds = sum(picture.num_embeds for picture in pictures)
    if len(places) != num_embeds:
        raise _wrong_number("image tokens", len(places), num_embeds)
    features: list[MultiModalFeature] = []
    end = 0
    for picture in pictures:
        size = picture.num_embeds // picture.num_parts
        for part in range(picture.num_parts):
            start = end
            end += size
            identifier = picture.identifier
            tensors = picture.tensors
            if picture.num_parts > 1:
                identifier = sha256(identifier + part.to_bytes(4)).digest()
                tensors = [_part_of(tensor, part) for tensor in tensors]
            offset = places[start]
            length = places[end - 1] + 1 - offset
            memory = picture.memory
            feature = MultiModalFeature(
                identifier, offset, length, size, picture.grid, memory.path, tensors, memory.inode
            )
            features.append(feature)
    return features


def _part_of(tensor: TensorPlace, part: int) -> TensorPlace:
    """Return the place of a part: an index of the tensor's second dimension."""
    first, _, *sides = tensor.shape
    num_bytes = prod(sides) * (4 if tensor.dtype == "float32" else 8)
    offset = tensor.offset + part * num_bytes
    return TensorPlace(tensor.name, tensor.dtype, [first, 1, *sides], offset)


def _wrong_number(what: str, actual: int, expected: int) -> InvalidRequest:
    return InvalidRequest(
        f"the prompt has {actual} {what}, but its pictures need {expected}: leave special tokens "
        "out of the messages",
        param="messages",
    )
