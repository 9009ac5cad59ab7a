"""The inputs of a step."""
