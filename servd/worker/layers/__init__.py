"""The layers of models. Each layer loads its rank's shard of the checkpoint by itself."""
