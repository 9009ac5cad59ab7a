"""Layers that models are made of. Each loads its rank's shard of the checkpoint by itself."""
