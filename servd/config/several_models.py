"""The options of a server of several models."""

from typing import Annotated

from msgspec import Meta

from servd.config._section import Section


class ModelsConfig(Section, frozen=True):
    """Several models."""

    models_dir: str | None = None
    """Folder of models to serve, each under the name of its subfolder. The first request for a
    model starts it in its own process.
    """
    models: list[str] = []
    """Models to serve like those of --models-dir: folders, GGUF files or Hugging Face ids. servd
    downloads ids at the start.
    """
    models_pull: bool = False
    """Let clients download models of the Hugging Face hub into --models-dir, by /api/pull."""
    models_max: Annotated[int, Meta(ge=1, le=256)] = 1
    """Maximum models that hold their weights. To load another one, servd puts the least recently
    used model to sleep.
    """
    models_asleep: Annotated[int, Meta(ge=0, le=256)] = 4
    """Maximum sleeping models, each an idle process of half a GiB. Beyond it, servd stops the least
    recently used.
    """
    models_memory: Annotated[float, Meta(gt=0)] | None = None
    """Maximum GiB of the weight files of all awake models. Default: no limit."""
    models_start_timeout: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds in which a model must load. If it does not, requests get 503, and servd waits as long
    before it tries again.
    """
