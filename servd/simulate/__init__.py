"""A simulator of servd's own scheduler, KV cache and router in virtual time."""
