"""Groups of layers in the KV cache of hybrid models: sliding-window layers keep only their window.

Groups share tensors: the first layers of all groups use the first tensor, and so on. A block has
the same size in every group, so any group can use it.
"""

import logging
from typing import Any

from servd.config import Config
from servd.config.kv_layout import KVLayout
from servd.worker.attention import AttentionBackend
from servd.worker.layers.attention import attention_layers
from servd.worker.layers.state import State
from servd.worker.layers.weight import Loadable

log = logging.getLogger("servd.worker")


def arrange(
    model: Loadable, config: Config, backend: AttentionBackend[Any], has_draft: bool
) -> tuple[int | None, ...]:
    """Assign each attention layer its group, and its tensor within the group. `model`: its layers
    have cache numbers, and no groups yet. `has_draft`: a draft model keeps its keys and values in
    the same blocks.
    """
    longest = config.model.max_model_len
    layers = attention_layers(model)
    assert longest is not None
    widest: dict[int, int] = {}  # cache number -> tokens that its layers read
    for layer in layers:
        window = layer.sliding_window if layer.shape["is_causal"] else None
        kept = longest if window is None else window + (backend.num_read_before or 0)
        widest[layer.layer] = max(widest.get(layer.layer, 0), min(kept, longest))
    caches: dict[int, list[int]] = {}  # window -> cache numbers, full attention first
    for number, window in sorted(widest.items(), key=lambda item: -item[1]):
        caches.setdefault(window, []).append(number)
    if [*caches] in ([], [longest]):
        return (None,)
    if why := _obstacle(model, config, backend, has_draft):
        log.info("layers with a window keep all tokens in the KV cache: %s", why)
        return (None,)
    counts = {window: len(numbers) for window, numbers in caches.items()}
    layout = KVLayout.from_config(config)

    def blocks(size: int) -> int:  # per layer, of the longest request, in groups of `size` layers
        groups = {window: -(-count // size) for window, count in counts.items()}
        max_blocks = {window: layout.max_blocks(window, longest, 1) for window in groups}
        return size * sum(groups[window] * max_blocks[window] for window in groups)

    size = min(range(max(counts.values()), min(counts.values()) - 1, -1), key=blocks)
    if blocks(size) >= len(widest) * layout.blocks(longest):
        return (None,)
    windows: list[int | None] = []
    places: dict[int, tuple[int, int]] = {}
    for window, numbers in caches.items():
        for at, number in enumerate(numbers):
            places[number] = len(windows) + at // size, at % size
        windows += [None if window == longest else window] * -(-len(numbers) // size)
    for layer in layers:
        layer.group, layer.layer = places[layer.layer]
    log.info("KV cache in groups of %d layers, which keep %s tokens", size, _names(windows))
    return tuple(windows)


def _obstacle(
    model: Loadable, config: Config, backend: AttentionBackend[Any], has_draft: bool
) -> str:
    """Return why the layers cannot be grouped; "" if they can."""
    if config.cache.has_connector:
        return "the KV connector moves blocks of all layers at once"
    if config.parallel.pipeline_parallel_size > 1:
        return "stages of a pipeline have different layers"
    if has_draft:
        return "the layers of the draft need them"
    if any(isinstance(module, State) for _, module in model.named_modules()):
        return "a checkpoint of states belongs to the blocks of all layers"
    if backend.num_read_before is None:
        return "this --attention-backend may read any before a window"
    return ""


def _names(windows: list[int | None]) -> str:
    names = ["all" if window is None else str(window) for window in windows]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
