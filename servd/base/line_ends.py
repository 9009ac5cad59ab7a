"""Escapes characters in JSON that readers of lines take for ends of lines."""

# Python's `str.splitlines`, and with it httpx and Ollama's client, splits at these three. JSON
# escapes all other line ends anyway.
ESCAPES = {
    "\N{NEXT LINE}".encode(): rb"\u0085",
    "\N{LINE SEPARATOR}".encode(): rb"\u2028",
    "\N{PARAGRAPH SEPARATOR}".encode(): rb"\u2029",
}


def escape_line_ends(document: bytes) -> bytes:
    """Return a JSON document, or lines with documents, as one line for any reader."""
    if document.isascii():
        return document
    for character, escape in ESCAPES.items():
        document = document.replace(character, escape)
    return document
