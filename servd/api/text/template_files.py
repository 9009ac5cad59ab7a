"""Reads chat templates: --chat-template, or the files in which transformers keeps a model's."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from servd.base.errors import ConfigError, ModelNotFound
from servd.checkpoint.config_json import read_json

log = logging.getLogger("servd.api")

# In the order of precedence. In transformers, processors read them, and tokenizers do not.
PROCESSOR_FILES = ("chat_template.json", "processor_config.json")


class Template(NamedTuple):
    """A template's text, and the name of its file."""

    text: str
    origin: str


def read_override(override: str) -> dict[str, str]:
    """Return the template of --chat-template, a file or Jinja text, as the default template. Raise
    ConfigError if there is no such file.
    """
    is_text = "{%" in override or "{{" in override or "\n" in override
    try:
        return {"default": override if is_text else Path(override).read_text(encoding="utf8")}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"--chat-template {override}: {reason}, and it contains no Jinja"
        ) from None


def read_model_templates(folder: str, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return a model's templates by name, and log their files: Jinja files, or else
    tokenizer_config.json, or else the processor's files. Raise ModelNotFound if one is broken.
    """
    chosen: dict[str, Template] = {}
    for templates in _read_all(Path(folder) if folder else None, tokenizer_config):
        if not chosen:
            chosen = templates
        elif "default" in templates:
            chosen = {"default": templates["default"]} | chosen
        if "default" in chosen:
            break
    for name, template in chosen.items():
        log.info("chat template (%s): %s", name, template.origin)
    return {name: template.text for name, template in chosen.items()}


def _read_all(folder: Path | None, config: dict[str, Any]) -> Iterator[dict[str, Template]]:
    """Yield the templates of each format by name, in the order of precedence."""
    if folder is not None:
        files = {"default": folder / "chat_template.jinja"}
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        files |= {file.name.removesuffix(".jinja"): file for file in more}
        yield {name: _read_file(file, folder) for name, file in files.items() if file.is_file()}
    yield _by_name(config.get("chat_template"), f"{folder or ''}/tokenizer_config.json")
    for name in PROCESSOR_FILES:
        if folder is not None and (folder / name).is_file():
            yield _by_name(read_json(folder / name).get("chat_template"), f"{folder}/{name}")


def _read_file(file: Path, folder: Path) -> Template:
    try:
        return Template(file.read_text(encoding="utf8"), str(file.relative_to(folder)))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{file} cannot be read: {error}") from None


def _by_name(templates: Any, path: str) -> dict[str, Template]:
    """Return the templates of a JSON file: a text, texts by name, or a list of objects with name
    and template.
    """
    origin = path.rpartition("/")[2]
    if templates is None:
        return {}
    if isinstance(templates, str):
        templates = {"default": templates}
    if isinstance(templates, dict) and all(isinstance(text, str) for text in templates.values()):
        return {str(name): Template(text, origin) for name, text in templates.items()}
    try:
        return {
            str(template["name"]): Template(str(template["template"]), origin)
            for template in templates
        }
    except (TypeError, KeyError):
        raise ModelNotFound(f"{path}: chat_template has an unknown format") from None
