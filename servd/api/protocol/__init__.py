"""The shapes of requests and responses: pydantic reads the former, msgspec writes the latter."""
