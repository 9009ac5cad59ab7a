"""Batches: files of requests that are answered in the background."""
