"""What the commands of `cli` and `bench` share: flags, tables, a client, a server to measure."""
