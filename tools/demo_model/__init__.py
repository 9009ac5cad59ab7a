"""The embedded demo model: its training text, its training and its tests."""
