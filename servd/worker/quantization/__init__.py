"""Weights of fewer bits, one file per format: `quantize` makes them, `read` reads checkpoints.

`quantize(weight) -> QuantMethod | None` implements --quantization NAME. It takes [out, in] of any
float type; None leaves the weight unchanged. `quantize_table`, if defined, is for tables of the
vocabulary. `read(files, config, device)` is for checkpoints whose config.json has NAME as
`quant_method`. It yields the tensors under the model's names, `Quantized` tensors on the device. It
raises UnsupportedModel if the result would not be exact. `config` is `quantization_config`.
"""
