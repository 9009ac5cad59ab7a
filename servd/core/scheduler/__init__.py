"""Which requests compute what in the next step."""
