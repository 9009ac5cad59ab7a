"""Conversion between text and tokens: chat templates, tokenizer, detokenizer."""
