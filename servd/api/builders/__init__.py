"""How the outputs of a request become a response: one builder for each API's shapes."""
