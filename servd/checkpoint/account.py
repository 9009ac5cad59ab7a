"""The account of a model's files: keys that servd uses, keys without effect, and keys that it does
not understand, which could change answers and are refused by name. account.toml has the tables.
"""

import logging
import tomllib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from servd.base.errors import UnsupportedModel

log = logging.getLogger("servd.checkpoint")

FLAG = "--allow-unknown-keys"
MAX_NAMED = 16  # keys in an error message
MAX_SHOWN = 40  # characters of a value
MAX_NUMBER = 1e100


class AccountTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What servd knows about the keys of a file. A name may be a pattern, such as `_*`."""

    used: list[str] = []
    only: dict[str, list[Any]] = {}  # key -> the values, of it or of its items, that servd computes
    without_effect: dict[str, list[str]] = {}  # reason -> keys
    defaults: dict[str, Any] = {}  # of transformers, for keys that a file leaves out
    nullable: list[str] = []  # keys with a default for which null means none
    aliases: dict[str, list[str]] = {}  # key -> its names in other families, which count after it
    untyped: list[str] = []  # keys with a default whose values may be of another type
    refused: str = ""  # why servd does not run models of this type


@cache  # read where it is needed: it takes 10 ms, and most processes get a complete ModelSpec
def read_tables() -> dict[str, AccountTable]:
    """Return the tables of account.toml."""
    text = Path(__file__).with_name("account.toml").read_text(encoding="utf8")
    return msgspec.convert(tomllib.loads(text), dict[str, AccountTable])


class Account(msgspec.Struct, frozen=True):
    """What servd makes of the keys of a file, or the files of a folder."""

    file: str
    entries: str = "keys"
    used: list[str] = []
    without_effect: dict[str, str] = {}  # key -> reason
    unknown: dict[str, Any] = {}  # key -> value
    remedy: str = "remove them"

    @property
    def advice(self) -> str:
        return f"{self.remedy}, or add {FLAG} to ignore them"

    @property
    def in_words(self) -> str:
        """The keys that servd does not understand, with their values."""
        words = [f"{key} ({value!r:.{MAX_SHOWN}})" for key, value in self.unknown.items()]
        if len(words) > MAX_NAMED:
            words = [*words[:MAX_NAMED], f"and {len(words) - MAX_NAMED} more"]
        return ", ".join(words)


def account_for(file: str, values: Mapping[str, Any], *tables: str) -> Account:
    """Return the account of a file's keys by some tables of account.toml; a table that does not
    exist is empty, and the last table decides about a key that several have. `file`: its name for
    people. A null is without effect where false is.
    """
    there_are = read_tables()
    tables_to_read = [there_are[name] for name in reversed(tables) if name in there_are]
    reasons = {key: _reason(tables_to_read, key, value) for key, value in values.items()}
    return Account(
        file,
        used=[key for key, reason in reasons.items() if reason == ""],
        without_effect={key: reason for key, reason in reasons.items() if reason},
        unknown={key: values[key] for key, reason in reasons.items() if reason is None},
    )


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a file whose nulls stand for defaults, without those."""
    return {key: value for key, value in values.items() if value is not None}


def check(accounts: Iterable[Account], allow_unknown_keys: bool = False) -> None:
    """Raise UnsupportedModel for keys that servd does not understand, or log them."""
    for account in accounts:
        if not account.unknown:
            continue
        what = f"{account.entries} that servd does not understand"
        refusal = f"{account.file} has {what}: {account.in_words}"
        if not allow_unknown_keys:
            raise UnsupportedModel(
                f"{refusal}. They could change the model's answers: {account.advice}"
            )
        log.warning("%s; they are ignored (%s)", refusal, FLAG)


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with transformers' defaults for keys that it leaves out. Raises
    UnsupportedModel if a value has another type than its default.
    """
    tables = read_tables()
    rules = tables["config"]
    defaults = tables.get(f"config.{config.get('model_type')}", AccountTable()).defaults
    for key, default in defaults.items():
        value = config.get(key, default)
        is_none = value is None and (type(default) is bool or key in rules.nullable)
        if not (is_none or key in rules.untyped or is_like(value, default)):
            raise UnsupportedModel(
                f"config.json: {key} is {value!r:.{MAX_SHOWN}}, expected a value like {default!r}"
            )
    return defaults | config


def object_in(
    values: Mapping[str, Any], key: str, place: str = "config.json: "
) -> dict[str, Any] | None:
    """Return the JSON object under a key; None if there is none. Raises UnsupportedModel for values
    of other types. `place`: begins the message.
    """
    value = values.get(key)
    if value is not None and not isinstance(value, dict):
        raise UnsupportedModel(f"{place}{key}: {value!r:.{MAX_SHOWN}} must be a JSON object")
    return value


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number with which servd can compute."""
    return type(value) in (int, float) and abs(value) < MAX_NUMBER  # which NaN is not


def is_like(value: Any, other: Any) -> bool:
    """Return whether a value has the type of another; floats may be whole numbers."""
    return is_number(value) if is_number(other) else type(value) is type(other)


def _reason(tables: list[AccountTable], key: str, value: Any) -> str | None:
    """Return why a key has no effect; "" if it is used; None if it is unknown."""
    for table in tables:
        is_default = value is None and key in table.used
        if key in table.only and not is_default and not _is_one_of(value, table.only[key]):
            return None
        if _is_among(key, table.used):
            return ""
        for reason, keys in table.without_effect.items():
            if _is_among(key, keys):
                return reason
        if key in table.only:
            return "the value that servd computes"
    return "it is null" if value is None else None


def _is_one_of(value: Any, values: list[Any]) -> bool:
    """Return whether a value, or each item of a list, is among values; a null is like false."""
    if value is None:
        return False in values
    return value in values or (isinstance(value, list) and all(item in values for item in value))


def _is_among(key: str, patterns: list[str]) -> bool:
    return key in patterns or any(fnmatchcase(key, p) for p in patterns if "*" in p)
