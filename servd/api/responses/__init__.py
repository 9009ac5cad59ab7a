"""Stored responses and the logs of their events."""
