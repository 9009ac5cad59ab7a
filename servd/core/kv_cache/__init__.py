"""The KV cache as block numbers: who owns which block, and which blocks hold which tokens."""
