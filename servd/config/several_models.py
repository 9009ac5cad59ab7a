"""The options of a server of several models."""

from typing import Annotated

from msgspec import Meta

from servd.config._section import Section, about


class ModelsConfig(Section, frozen=True):
    """Several models."""

    models_dir: Annotated[
        str | None,
        about(
            "Serve each model in this folder, under its folder's name, by a server of its own "
            "that is started when a request names it."
        ),
    ] = None
    models: Annotated[
        list[str],
        about(
            "Serve these models, folders, GGUF files or models of the hub, as if they were what "
            "--models-dir has; those of the hub are downloaded at the start."
        ),
    ] = []
    models_max: Annotated[
        int,
        about(
            "Of several models, those that hold their weights at once. For others the one that "
            "was used longest ago sleeps.",
            ge=1,
            le=256,
        ),
    ] = 1
    models_asleep: Annotated[
        int,
        about(
            "Of several models, those that may sleep at once, in idle processes of half a GiB "
            "each. Of more, the one that was used longest ago stops.",
            ge=0,
            le=256,
        ),
    ] = 4
    models_memory: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        about("GiB that the weights of all models that are awake may have on disk."),
    ] = None
    models_start_timeout: Annotated[
        Annotated[float, Meta(gt=0)],
        about(
            "Seconds that one of several models may take to load. Then its server is stopped, "
            "requests get 503, and it is not tried again for as long."
        ),
    ] = 600.0
