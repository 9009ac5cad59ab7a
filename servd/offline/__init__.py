"""LLM and LLMEngine, without a server."""
