"""Batches: files of requests that servd answers in the background."""
