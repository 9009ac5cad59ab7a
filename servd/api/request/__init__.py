"""The state of one prompt in the API server: its request, its choices, its latency breakdown."""
