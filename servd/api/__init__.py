"""The API server: HTTP in and out, as text without tensors. Imports no torch or transformers."""
