"""The KV cache as block numbers: which request owns a block, and which tokens the block holds."""
