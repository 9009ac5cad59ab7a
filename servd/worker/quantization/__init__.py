"""Weights of fewer bits, made as they are loaded: one file per --quantization, `quantize` in it."""
