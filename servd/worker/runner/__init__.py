"""Runs the steps of a model."""
