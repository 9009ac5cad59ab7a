"""The options of files and batches."""

from typing import Annotated

from servd.config._section import Section, about


class BatchConfig(Section, frozen=True):
    """Files and batches."""

    batch_dir: Annotated[
        str | None,
        about(
            "Folder for uploaded files and batches, which continue after a restart. Default: "
            "`/v1/files` and `/v1/batches` reject all requests."
        ),
    ] = None
