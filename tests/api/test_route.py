"""Route: the document has one schema for each name, and wrong parameters are named."""

from __future__ import annotations

import msgspec
import pytest

from servd.api.http import route
from servd.api.http.route import schema_of
from tests.api.harness import serve
from tests.api.test_errors import check


def test_two_structs_of_one_name_are_refused(monkeypatch):
    monkeypatch.setattr(route, "ANSWERS", {})
    first = msgspec.defstruct("SameName", [("a", int)])
    second = msgspec.defstruct("SameName", [("b", str)])
    assert schema_of(first) == {"$ref": "#/components/schemas/SameName"}
    with pytest.raises(AssertionError, match="SameName"):
        schema_of(second)


@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("GET", "/v1/requests?recent=0", "recent"),
        ("GET", "/v1/requests?slowest=201", "slowest"),
        ("GET", "/v1/steps?recent=x", "recent"),
        ("GET", "/v1/requests/a/timeline?format=xml", "format"),
        ("GET", "/v1/files?limit=10001", "limit"),
        ("GET", "/v1/batches?order=up", "order"),
        ("GET", "/v1/responses/a?stream=maybe", "stream"),
        ("GET", "/v1/responses/a?starting_after=-1", "starting_after"),
        ("GET", "/v1/responses/a?starting_after=" + "9" * 5000, "starting_after"),
        ("POST", "/sleep?level=3", "level"),
    ],
)
async def test_wrong_parameters_are_named(method, path, param, tmp_path):
    async with serve(batch_dir=str(tmp_path)) as served:
        message = check(await served.http.request(method, path), 400, param)
    assert message.startswith(f"{param} must be ")
    assert len(message) < 200
