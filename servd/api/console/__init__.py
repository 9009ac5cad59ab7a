"""The console: a page for people, made of static files that need nothing from elsewhere."""

import hashlib
from functools import lru_cache
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing inline but pictures of messages, and nothing from elsewhere; and where a browser knows
# trusted types, no text becomes markup.
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "Accept",
    "x-content-type-options": "nosniff",
}


class File(msgspec.Struct, frozen=True):
    content: bytes
    headers: dict[str, str]


@lru_cache
def files() -> dict[str, File]:
    """Return all files of the page, by their path below `/console/`.

    The page's head lists all scripts, so that a panel is one new file.
    """
    paths = [path for path in sorted(FOLDER.rglob("*")) if path.suffix in MEDIA_TYPES]
    contents = {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in paths}
    scripts = (f'<link rel="modulepreload" href="console/{n}">' for n in contents if ".js" in n)
    page = contents["index.html"].replace(b"<!-- modulepreload -->", "\n".join(scripts).encode())
    files_by_name: dict[str, File] = {}
    for name, content in {**contents, "index.html": page}.items():
        media_type = MEDIA_TYPES[Path(name).suffix]
        etag = hashlib.sha256(content).hexdigest()[:32]
        files_by_name[name] = File(
            content, {**HEADERS, "content-type": media_type, "etag": f'"{etag}"'}
        )
    return files_by_name


def open_paths() -> set[str]:
    """Return the paths of the files. They need no API key, which a browser cannot send before it
    has the page. The files are equal on every server; data comes from routes that need a key.
    """
    return {f"/console/{name}" for name in files()}
