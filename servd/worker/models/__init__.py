"""One file per Hugging Face `model_type`, with a class named as in `architectures`.

A model takes (spec, parallel) and has `forward(input_ids, positions, ctx)`,
`compute_logits(hidden)`, `packed` (checkpoint name -> fused parameter), `ignored` (checkpoint
tensors that it does not need) and Attention layers, each of which has a KV cache. It reads its own
keys of config.json, and refuses with UnsupportedModel what it would compute wrongly. A model that
resembles Llama derives from `LlamaForCausalLM` and names the parts that differ; no class derives
from one that derives from another class of servd. A new file is tested by tests/parity as soon as
it has a tiny config there. `_transformers.py` is for those that have no file.
"""
