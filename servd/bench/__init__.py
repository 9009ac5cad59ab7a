"""`servd bench`: a file for each command."""
