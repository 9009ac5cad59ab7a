"""The files of a model."""
