"""/v1/files: the input and the output of batches."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from servd.api.context import json_response, shelf_of
from servd.api.openapi import describes
from servd.api.paging import page, query
from servd.api.protocol.batches import UPLOAD, DeletedFile, FileObject, Files
from servd.errors import InvalidRequest

router = APIRouter()


@router.post("/v1/files")
@describes(FileObject, form=UPLOAD, errors=(404, 429))
async def upload_file(request: Request) -> Response:
    """Keep a file of requests for a batch, up to 200 MiB."""
    shelf = shelf_of(request)
    with shelf.uploading():
        async with request.form(max_files=1, max_fields=8) as form:
            purpose, file = form.get("purpose"), form.get("file")
            if purpose != "batch":
                raise InvalidRequest("`purpose` must be batch: no other is known", param="purpose")
            if not isinstance(file, UploadFile):
                raise InvalidRequest(
                    "`file` is missing: send multipart/form-data with a file of that name",
                    param="file",
                )
            added = await asyncio.to_thread(shelf.add_file, file.file, file.filename or "")
    return json_response(added)


@router.get("/v1/files")
@describes(Files, query=query(10_000, 10_000) | {"purpose": {"type": "string"}}, errors=(404,))
async def list_files(request: Request) -> Response:
    """The files of this API key, also what batches have written."""
    shelf = shelf_of(request)
    files = await asyncio.to_thread(shelf.all, "file-", FileObject)
    purpose = request.query_params.get("purpose")
    chosen = [file for file in files if purpose in (None, file.purpose)]
    return json_response(Files(*page(request, chosen, lambda file: file.id, 10_000, 10_000)))


@router.get("/v1/files/{file_id}")
@describes(FileObject)
async def retrieve_file(request: Request, file_id: str) -> Response:
    """What is known of a file."""
    return json_response(shelf_of(request).load(file_id, FileObject))


@router.get("/v1/files/{file_id}/content")
@describes(str, media_types=("application/octet-stream",))
async def file_content(request: Request, file_id: str) -> Response:
    """The file itself."""
    shelf = shelf_of(request)
    path = shelf.content(shelf.load(file_id, FileObject))
    return FileResponse(path, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}")
@describes(DeletedFile)
async def delete_file(request: Request, file_id: str) -> Response:
    """Forget a file. A batch that reads it at this moment goes on, but not after a restart."""
    shelf = shelf_of(request)
    file = shelf.load(file_id, FileObject)
    shelf.delete_file(file)
    return json_response(DeletedFile(file.id))
