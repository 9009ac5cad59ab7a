"""`make bench-gpu`: what a GPU could do, and what servd does on it, measured in one run."""
