"""Short names of models, such as "qwen3:0.6b", from models.toml and the user's own table."""

import os
import tomllib
from pathlib import Path

from servd.base.errors import ConfigError

TABLE = Path(__file__).with_name("models.toml")


def full_name(model: str) -> str:
    """Return the model of a short name; other names are unchanged. Raises ConfigError."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))
    names: dict[str, str] = {}
    for table in (TABLE, folder / "servd" / "models.toml"):
        try:
            names |= tomllib.loads(table.read_text(encoding="utf8"))
        except OSError:  # there is none, or this user has no access to it
            pass
        except ValueError as error:
            raise ConfigError(f"{table}: {error}") from None
    return str(names.get(model, model))
