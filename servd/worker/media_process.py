"""The process that decodes pictures: it gets bytes from clients, and has no socket to the world."""
