"""The device, its memory and its ranks."""
