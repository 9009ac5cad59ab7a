"""The requests and responses of `/v1/files` and `/v1/batches`."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from servd.api.protocol.batch_file import ROUTES, Problem
from servd.api.protocol.list_page import ListPage
from servd.api.protocol.validation import FewKeys, RequestBody

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
WINDOW = 24 * 3600  # seconds that a batch has


class FileObject(msgspec.Struct, tag_field="object", tag="file"):
    """A file: a batch's input, its output, or its errors."""

    id: str
    bytes: int
    created_at: int  # Unix time
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"] = "batch"
    status: str = "processed"


class DeletedFile(msgspec.Struct, tag_field="object", tag="file"):
    """The response of DELETE for a file."""

    id: str
    deleted: bool = True


class RequestCounts(msgspec.Struct):
    """The number of a batch's requests: all, answered with 200, and failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Problems(msgspec.Struct, tag_field="object", tag="list"):
    """The reasons why a batch failed as a whole."""

    data: list[Problem]


class Batch(msgspec.Struct, tag_field="object", tag="batch", kw_only=True):
    """A batch and its progress. Times are Unix times in seconds."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int  # lines without a result by then get none
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ] = "validating"
    completion_window: str = "24h"
    errors: Problems | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")


class Files(ListPage[FileObject]):
    """A page of the list of files."""


class Batches(ListPage[Batch]):
    """A page of the list of batches."""


class BatchRequest(RequestBody):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: Annotated[str, Field(pattern=f"^({'|'.join(ROUTES)})$")]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue] | None, FewKeys] = None


UPLOAD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
    "required": ["file", "purpose"],
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
}
