"""The shapes of requests and responses: pydantic reads what clients send, msgspec writes what they
get.
"""
