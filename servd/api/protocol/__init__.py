"""The types of requests and responses: pydantic reads requests, msgspec writes responses."""
