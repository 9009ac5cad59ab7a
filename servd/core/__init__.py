"""The engine core, which decides what runs. It handles only integers: no text, tensors or torch."""
