"""IgnoredFields: counts request fields without effect, and logs each likely typo once."""

import difflib
import logging
from collections.abc import Callable, Sequence
from itertools import islice

from servd.api.protocol.validation import RequestBody

log = logging.getLogger("servd.api")

MAX_NAMES = 1000  # that are ever looked at
MAX_NEW_NAMES = 4  # of a request: each costs some milliseconds
MAX_LENGTH = 40  # of a name; no field has a longer one
SIMILARITY = 0.85  # of difflib: 1 is the same


class IgnoredFields:
    """The fields without effect in all requests to this process."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self.count = count
        self._names: set[str] = set()  # that were looked at

    def report(self, body: RequestBody, num_names: int, names: Sequence[str], path: str) -> None:
        """Count a body's fields. Log each new one of `names` that resembles a known field."""
        self.count(num_names)
        new = (name for name in names if name not in self._names and len(name) <= MAX_LENGTH)
        fields = {*type(body).model_fields, *body.from_chat}
        for name in islice(new, min(MAX_NEW_NAMES, MAX_NAMES - len(self._names))):
            self._names.add(name)
            meant = difflib.get_close_matches(name, fields - {name}, 1, SIMILARITY)
            if meant:
                log.warning("%s: %a has no effect: did you mean %s?", path, name, meant[0])
