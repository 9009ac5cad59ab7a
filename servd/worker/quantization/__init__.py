"""Weights of fewer bits, one file per format: `quantize` makes them, `read` reads checkpoints.

`quantize(weight) -> QuantMethod | None` is --quantization NAME: [out, in] of any float type, or
None to leave it as it is; `quantize_table`, if there, is for tables of the vocabulary.
`read(files, config, device)` is for checkpoints whose config.json has NAME as `quant_method`: it
yields the tensors under the model's names, `Quantized` ones on the device, and raises
UnsupportedModel for what would not be exact. `config` is `quantization_config`.
"""
