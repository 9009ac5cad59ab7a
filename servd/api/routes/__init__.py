"""The HTTP routes: a `router` per file. Routes of other servers are in `compat`."""

from fastapi import APIRouter

from servd.base import plugins

COMPAT = f"{__name__}.compat"


def load_routers() -> list[APIRouter]:
    """Return the routers of all files, routes of `compat` last."""
    names = [name for name in plugins.names(__name__) if name != "compat"]
    routers = [plugins.load(__name__, name, "router") for name in names]
    return routers + [plugins.load(COMPAT, name, "router") for name in plugins.names(COMPAT)]
