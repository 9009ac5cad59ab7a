"""Plugins: lists and loads the modules of a package, whose file names are option values."""

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from typing import Any, TypeVar

from servd.base.errors import ConfigError

T = TypeVar("T")


@functools.cache  # called often while an application is created
def names(package: str) -> Sequence[str]:
    """Return the option names of the modules in `package` ("servd.worker.attention"), sorted.

    Files whose names start with an underscore are shared parts, not options. Imports nothing from
    the package.
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None, package
    modules = (module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))
    return tuple(sorted(name for name in modules if not name.startswith("_")))


def check(option: str, package: str, name: str, *other_names: str) -> None:
    """Check, without importing, that `load` would find the module `name`, or that `name` is in
    `other_names`. Raises ConfigError with the option and the valid names.
    """
    there_are = [*other_names, *names(package)]
    if ":" not in name and name.replace("-", "_") not in there_are:
        raise ConfigError(f"{option} {name!r} is unknown; there are: {', '.join(there_are)}")


def load(package: str, name: str, attribute: str, *default: Any) -> Any:
    """Return `attribute` of the module `name` in `package`, or what a `name` like
    "package.module:Attribute" refers to, so that code outside servd needs no entry point.

    Raises ConfigError, which lists the existing files, if the file is missing; AttributeError if
    the file lacks the attribute and there is no default. An error during the plugin's own import is
    raised unchanged.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            plugin_module = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(
                f"{name}: the module {error.name} was not found; install it, or put its folder "
                "on PYTHONPATH"
            ) from None
        if not hasattr(plugin_module, attribute):
            raise ConfigError(f"{name}: module {module} has no {attribute!r}; check its spelling")
        return getattr(plugin_module, attribute)
    check(package.rpartition(".")[2], package, name)
    module = importlib.import_module(f"{package}.{name.replace('-', '_')}")
    return getattr(module, attribute, *default)


def load_class(package: str, name: str, base: type) -> Any:
    """Return the only subclass of `base` in the module `name`, or what a `name` like
    "package.module:Attribute" refers to. Raises ConfigError as `load` does.
    """
    if ":" in name:
        return load(package, name, "")
    members = load(package, name, "__dict__")
    classes = [member for member in members.values() if isinstance(member, type)]
    [plugin] = [
        member
        for member in classes
        if issubclass(member, base) and member.__module__ == members["__name__"]
    ]
    return plugin
