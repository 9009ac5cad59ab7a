"""Weights of fewer bits, one file per format: `quantize` makes them, `read` reads checkpoints.

`quantize(weight) -> Form | None` is --quantization NAME: [out, in] of any float type to a form, or
None to leave it; `quantize_table`, where there is one, is for tables of the vocabulary.
`read(files, config, device)` is for checkpoints whose config.json has NAME as `quant_method`: it
yields the tensors under the model's names, `Quantized` ones on the device, and raises
UnsupportedModel for what would not be exact. `config` is `quantization_config`.
"""
