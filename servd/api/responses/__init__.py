"""Responses that are stored, and their events."""
