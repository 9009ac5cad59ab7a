"""LoRA: adapters beside the model's matrices, several in a step; `Adapters` is the way in."""
