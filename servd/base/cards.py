"""Card: a kind of GPU, with what kernels and estimates need to know of it."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec

# Shares of the data sheet that large copies and large products reached on an H100.
COPIES = 0.9
PRODUCTS = 0.8


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU. The defaults are the CPU's, where Triton's interpreter runs kernels in tests: one
    multiprocessor, so that programs loop over their pieces.
    """

    name: str = ""
    capability: tuple[int, int] = (0, 0)  # (9, 0) is Hopper
    num_sms: int = 1  # multiprocessors
    shared_memory: int = 0  # of a program, in bytes
    memory: int = 0  # in bytes
    bandwidth: float = 0.0  # of copies, in bytes per second; 0: unknown
    products: float = 0.0  # floating point operations per second in 16-bit products


def _card(name: str, row: dict[str, Any]) -> Card:
    facts = row | {
        "name": name,
        "memory": int(row["memory"] * (1 << 30)),
        "shared_memory": row["shared_memory"] << 10,
        "bandwidth": row["bandwidth"] * 1e12 * COPIES,
        "products": row["products"] * 1e12 * PRODUCTS,
    }
    return msgspec.convert(facts, Card)


_FILE = Path(__file__).with_name("cards.toml")
CARDS = {name: _card(name, row) for name, row in tomllib.loads(_FILE.read_text("utf8")).items()}


def find_card(name: str) -> Card:
    """Return the card that a driver calls `name`, such as "NVIDIA H100 80GB HBM3"."""
    letters = name.lower().replace(" ", "")
    return next((card for key, card in CARDS.items() if key in letters), Card())
