"""/v1/files: input and output files of batches."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from pydantic import Field
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from servd.api.batches.store import RETENTION
from servd.api.context import json_response, shelf_of
from servd.api.http.paging import Page
from servd.api.http.route import PathPart, Route, refusals, text_content
from servd.api.protocol.batches import UPLOAD, DeletedFile, FileObject, Files
from servd.base.errors import InvalidRequest

router = APIRouter(route_class=Route)

UTF_8 = re.compile(r"""; *charset=("utf-?8"|utf-?8) *(?=;|$)""", re.IGNORECASE)
MAX_CONTENT_TYPE = 1024  # characters; the parser's time grows with the square of their number
MIN_RETENTION = 3600  # seconds that a client may have a file kept, at the least


@router.post(
    "/v1/files",
    response_model=FileObject,
    responses=refusals(400, 404, 408, 413, 429),
    openapi_extra={
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": UPLOAD}}}
    },
)
async def upload_file(request: Request) -> Response:
    """Upload a file of requests for a batch, up to 200 MiB."""
    shelf = shelf_of(request)
    with shelf.uploading():
        async with read_form(request) as form:
            purpose = form.get("purpose")
            file = form.get("file")
            if purpose != "batch":
                raise InvalidRequest("`purpose` must be batch", param="purpose")
            if not isinstance(file, UploadFile):
                raise InvalidRequest(
                    "`file` is missing: send multipart/form-data with a part `file`", param="file"
                )
            seconds = kept_for(form)
            added = await asyncio.to_thread(shelf.add_file, file.file, file.filename or "", seconds)
    return json_response(added)


@asynccontextmanager
async def read_form(request: Request) -> AsyncIterator[FormData]:
    """Read a multipart body. Raises InvalidRequest: the body is not a valid form; the message
    contains the parser's error.
    """
    content_type = request.headers.get("content-type", "none")
    if not content_type.lower().startswith("multipart/form-data"):
        raise InvalidRequest(f"Content-Type must be multipart/form-data, got {content_type[:100]}")
    if len(content_type) > MAX_CONTENT_TYPE:
        raise InvalidRequest(
            f"Content-Type has {len(content_type)} characters, its limit is {MAX_CONTENT_TYPE}"
        )
    # The parser would decode with any codec of Python, and some take minutes for a megabyte.
    if len(UTF_8.findall(content_type)) != content_type.lower().count("charset"):
        raise InvalidRequest(
            f"the charset of multipart/form-data must be utf-8, got {content_type[:100]}"
        )
    try:
        form = await request.form(max_files=1, max_fields=8)
    except HTTPException as error:
        if error.status_code != 400:
            raise
        parser = error.__context__
        why = (parser and parser.__cause__) or error.detail
        raise InvalidRequest(f"the multipart body cannot be read: {str(why)[:200]}") from None
    try:
        yield form
    finally:
        await form.close()


def kept_for(form: FormData) -> int:
    """Return the seconds of `expires_after`. Raises InvalidRequest: the seconds are out of bounds,
    or `anchor` is not `created_at`.
    """
    anchor = form.get("expires_after[anchor]")
    text = form.get("expires_after[seconds]")
    if anchor is None and text is None:
        return RETENTION
    if anchor != "created_at":
        raise InvalidRequest("the `anchor` must be created_at", param="expires_after")
    seconds = 0
    if isinstance(text, str) and re.fullmatch(r"[0-9]{4,7}", text):
        seconds = int(text)
    if not MIN_RETENTION <= seconds <= RETENTION:
        why = f"`seconds` must be a whole number from {MIN_RETENTION} to {RETENTION}"
        raise InvalidRequest(why, param="expires_after")
    return seconds


class FilesPage(Page):
    """Query parameters that select the files to list."""

    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    purpose: str | None = None


@router.get("/v1/files", response_model=Files, responses=refusals(404))
async def list_files(request: Request, page: Annotated[FilesPage, Query()]) -> Response:
    """List the files of this API key, including results of batches."""
    files = await asyncio.to_thread(shelf_of(request).all, "file-", FileObject)
    chosen = [file for file in files if page.purpose in (None, file.purpose)]
    return json_response(Files(*page.of(chosen, lambda file: file.id)))


@router.get("/v1/files/{file_id}", response_model=FileObject)
async def retrieve_file(request: Request, file_id: PathPart) -> Response:
    """Return the size, purpose and creation time of a file."""
    return json_response(await asyncio.to_thread(shelf_of(request).load, file_id, FileObject))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=FileResponse,
    responses=text_content("application/octet-stream"),
)
async def file_content(request: Request, file_id: PathPart) -> Response:
    """Download the content of a file."""
    shelf = shelf_of(request)
    path = shelf.content(await asyncio.to_thread(shelf.load, file_id, FileObject))
    return FileResponse(path, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}", response_model=DeletedFile)
async def delete_file(request: Request, file_id: PathPart) -> Response:
    """Delete a file. A batch that is reading the file continues, but not after a restart."""
    shelf = shelf_of(request)
    await asyncio.to_thread(lambda: shelf.delete_file(shelf.load(file_id, FileObject)))
    return json_response(DeletedFile(file_id))
