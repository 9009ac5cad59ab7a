"""Basic modules that every package may use."""
