"""What a device can run: Triton's kernels, and by its properties, which products and tiles.

Callers read these through the module, so that tests run the CUDA path in Triton's interpreter, and
`servd plan` computes steps of cards that this machine does not have.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec

import torch
from msgspec.structs import replace

from servd.base.cards import Card, find_card
from servd.worker.ops import native

ASSUMED = ContextVar[Card | None]("ASSUMED", default=None)


@contextmanager
def assume(card: Card | None) -> Iterator[None]:
    """Within this context, every CUDA device is `card`, unless it is None."""
    token = ASSUMED.set(card)
    try:
        yield
    finally:
        ASSUMED.reset(token)


def card_of(device: torch.device) -> Card:
    if device.type != "cuda":
        return Card()
    return ASSUMED.get() or _card(device)


@cache
def _card(device: torch.device) -> Card:
    properties = torch.cuda.get_device_properties(device)
    return replace(
        find_card(properties.name),
        capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
        memory=properties.total_memory,
    )


def abilities_of_cuda() -> list[str]:
    """Return what the CUDA device can run, for people."""
    device = torch.device("cuda")
    if not runs_triton(device):
        return ["torch's operations only: install triton"]
    names = ["packed weights of 4 and 8 bits"]
    if capability(device) >= (8, 9):
        names.append("keys and values in fp8")
    if capability(device) >= (9, 0):
        names.append("products in fp8")
    return names


def runs_triton(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def runs_native(device: torch.device) -> bool:
    """Return whether the CPU library multiplies the device's matrices."""
    is_cpu = device.type == "cpu" and not runs_triton(device)
    return is_cpu and native.library() is not None


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, e.g. (9, 0) of Hopper; (0, 0) without CUDA."""
    return card_of(device).capability
