"""Replays recorded requests through servd's own scheduler, cache and router, in virtual time."""
