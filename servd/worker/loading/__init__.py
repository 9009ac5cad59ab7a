"""Loads weights from files into layers."""
