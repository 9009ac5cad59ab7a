"""The messages that cross process borders."""
