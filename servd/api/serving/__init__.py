"""Response builders: turn the outputs of a request into a response of each API."""
