"""One file per Hugging Face `model_type`, with a class named as in `architectures`.

A model takes (spec, parallel) and has `forward(input_ids, positions, ctx)`,
`compute_logits(hidden)`, `packed` (checkpoint name -> fused parameter), `ignored` (checkpoint
tensors that it does not need) and Attention layers, each with a KV cache. A model reads its own
keys of config.json. For keys that it would compute wrongly, it raises UnsupportedModel. A model
similar to Llama derives from `LlamaForCausalLM` and names the parts that differ. No class derives
from a class that derives from another class of servd. tests/parity tests a new file as soon as it
has a tiny config there. `_transformers.py` is for models without a file.
"""
