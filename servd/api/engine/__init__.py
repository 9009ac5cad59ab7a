"""The path of a request from its validation to the deltas of its output."""
