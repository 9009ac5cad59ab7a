"""Structured outputs, which follow a grammar: JSON schemas, regular expressions, choices."""
