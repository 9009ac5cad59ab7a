"""The options of files and batches."""

from servd.config._section import Section


class BatchConfig(Section, frozen=True):
    """Files and batches."""

    batch_dir: str | None = None
    """Folder for uploaded files and batches, which continue after a restart. Default: `/v1/files`
    and `/v1/batches` reject all requests.
    """
