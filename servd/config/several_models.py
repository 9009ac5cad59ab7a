"""The options of a server of several models."""

from typing import Annotated

from msgspec import Meta

from servd.config._section import Section, about


class ModelsConfig(Section, frozen=True):
    """Several models."""

    models_dir: Annotated[
        str | None,
        about(
            "Folder of models to serve, each under the name of its subfolder. The first request "
            "for a model starts it in its own process."
        ),
    ] = None
    models: Annotated[
        list[str],
        about(
            "Models to serve like those of --models-dir: folders, GGUF files or Hugging Face ids. "
            "servd downloads ids at the start."
        ),
    ] = []
    models_max: Annotated[
        int,
        about(
            "Maximum models that hold their weights. To load another one, servd puts the least "
            "recently used model to sleep.",
            ge=1,
            le=256,
        ),
    ] = 1
    models_asleep: Annotated[
        int,
        about(
            "Maximum sleeping models, each an idle process of half a GiB. Beyond it, servd stops "
            "the least recently used.",
            ge=0,
            le=256,
        ),
    ] = 4
    models_memory: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        about("Maximum GiB of the weight files of all awake models. Default: no limit."),
    ] = None
    models_start_timeout: Annotated[
        Annotated[float, Meta(gt=0)],
        about(
            "Seconds in which a model must load. If it does not, requests get 503, and servd "
            "waits as long before it tries again."
        ),
    ] = 600.0
