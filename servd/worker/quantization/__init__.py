"""Weights of fewer bits, made as a checkpoint is loaded: one file per --quantization, with a
function `quantize`.
"""
