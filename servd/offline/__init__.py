"""LLM and LLMEngine: run a model in a script, without a server."""
