"""The API room: HTTP in, HTTP out. Knows OpenAI and text, never a tensor; never imports torch or
transformers.
"""
