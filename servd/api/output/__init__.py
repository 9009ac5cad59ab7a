"""Splits the text that a model writes into content, reasoning and tool calls."""
