"""Weights of fewer bits, made of any checkpoint as it is loaded: one file per --quantization, with a function `quantize`."""
