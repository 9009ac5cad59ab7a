"""Weights from files to layers."""
