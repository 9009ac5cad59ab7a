"""Quantized weights, one file per format: `quantize` makes them, `read` reads checkpoints.

`quantize(weight) -> QuantMethod | None` is --quantization NAME: `weight` is [out, in] of any float
type; None leaves it unquantized. `quantize_table`, if present, quantizes vocabulary tables.
`read(files, config, device)` reads checkpoints whose config.json has NAME as `quant_method`. It
yields tensors under the model's names, `Quantized` tensors on the device, and raises
UnsupportedModel if a result would not be exact. `config` is `quantization_config`.
"""
