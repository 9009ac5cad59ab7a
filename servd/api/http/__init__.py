"""HTTP: connections, authentication, streams."""
