"""The API room: HTTP in and out. Knows text, never a tensor; imports no torch or transformers."""
