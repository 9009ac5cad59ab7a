"""The core room: decides what runs. Integers only: no text, no tensors, no torch."""
