"""Code shared by commands of `cli` and `bench`: flags, tables, a client, a server to measure."""
