"""LoRA: adapters beside the model's matrices, several per step. Start reading at `Adapters`."""
