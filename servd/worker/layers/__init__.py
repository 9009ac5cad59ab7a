"""What models are made of. Each layer takes its rank's share of the checkpoint by itself."""
