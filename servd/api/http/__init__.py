"""The HTTP layer: connections, authentication, middleware, routes and streams."""
