"""Plugins: lists and loads the modules of a package, whose file names are option values."""

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from typing import Any

from servd.base.errors import ConfigError


@functools.cache  # called often while an application is created
def names(package: str) -> Sequence[str]:
    """Option names of the modules in `package` (e.g. "servd.worker.attention"), sorted.

    Files that start with an underscore are shared parts, not options. Nothing of the package is
    imported.
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None, package
    found = (module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))
    return tuple(sorted(name for name in found if not name.startswith("_")))


def check(option: str, package: str, name: str, *others: str) -> None:
    """Check that `load` would find the module `name`, or that it is one of `others`, without
    importing it. The ConfigError names the option and what there is.
    """
    if ":" not in name and name.replace("-", "_") not in (there_are := [*others, *names(package)]):
        raise ConfigError(f"{option} {name!r} is unknown; there are: {', '.join(there_are)}")


def load(package: str, name: str, attribute: str) -> Any:
    """Return `attribute` of the module `name` in `package`, or of a `name` like
    "package.module:Attribute", so code outside servd needs no entry point.

    The ConfigError for a missing file lists those that exist. An error inside the plugin's own
    import is raised as it is.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(
                f"{name}: there is no module {error.name}; install it, or put its folder on "
                "PYTHONPATH"
            ) from None
        if not hasattr(found, attribute):
            raise ConfigError(f"{name}: module {module} has no {attribute!r}; check its spelling")
        return getattr(found, attribute)
    check(package.rpartition(".")[2], package, name)
    return getattr(importlib.import_module(f"{package}.{name.replace('-', '_')}"), attribute)
