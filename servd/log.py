"""Logging set-up: one format, with the process name, for every process of the tree."""

from __future__ import annotations

import logging
import sys


def setup(process: str, level: str) -> None:
    """Log to stderr as `12:34:56.789 INFO  api-0  message`. Called once by each process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {process:<8} %(message)s", datefmt="%H:%M:%S"
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries
    logging.getLogger("servd").setLevel(level.upper())
