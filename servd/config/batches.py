"""The options of files and batches."""

from typing import Annotated

from servd.config._section import Section, about


class BatchConfig(Section, frozen=True):
    """Files and batches."""

    batch_dir: Annotated[
        str | None,
        about(
            "Folder that keeps what `/v1/files` and `/v1/batches` are given, so that batches go "
            "on after a restart. Default: these routes refuse everything."
        ),
    ] = None
