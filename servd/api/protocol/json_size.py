"""Counts the values of a JSON text without parsing, because parsing blocks every thread."""

BACKSLASH = ord("\\")


def has_more_values(data: bytes, limit: int) -> bool:
    """Return whether a JSON text has more than about `limit` values: elements, containers, and
    keys, which count twice, as they take the longest to parse.

    For most texts, fast counts suffice. If strings may contain many commas or brackets, the
    strings are skipped, which takes some seconds for 32 MB. That work is done in short pieces: call
    this function in a thread.
    """
    if len(data) <= limit or _num_marks(data, 0, len(data)) <= limit:
        return False
    num_values = position = 0
    while num_values <= limit:
        start = data.find(b'"', position)
        num_values += _num_marks(data, position, start if start >= 0 else len(data))
        if start < 0:
            break
        end = data.find(b'"', start + 1)
        while end >= 0 and _is_escaped(data, end):
            end = data.find(b'"', end + 1)
        if end < 0:
            break  # not JSON: the parser reports it
        position = end + 1
    return num_values > limit


def _num_marks(data: bytes, start: int, end: int) -> int:
    return sum(data.count(mark, start, end) for mark in (b",", b":", b"[", b"{"))


def _is_escaped(data: bytes, quote: int) -> bool:
    first = quote
    while data[first - 1] == BACKSLASH:
        first -= 1
    return (quote - first) % 2 == 1
