"""The common parts of the commands in `cli` and `bench`: flags, tables, a client, a server."""
