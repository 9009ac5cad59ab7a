"""The `servd bench` command: one file per subcommand."""
