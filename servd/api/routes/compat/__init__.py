"""Routes that other servers have, one file each, with the shapes of their bodies and answers."""
