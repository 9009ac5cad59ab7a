"""Processes, and the channels between them."""
