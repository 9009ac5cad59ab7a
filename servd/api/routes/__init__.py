"""The HTTP routes: one family per file, each with a `router`; underscored files are shared."""

from __future__ import annotations

from fastapi import APIRouter

from servd import plugins


def load_routers() -> list[APIRouter]:
    """The routers of all files."""
    return [plugins.load(__name__, name, "router") for name in plugins.names(__name__)]
