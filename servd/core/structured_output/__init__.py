"""Outputs that follow a grammar: JSON schemas, regular expressions, choices."""
