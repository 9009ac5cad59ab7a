"""Routes of other servers' APIs, one file each, with their request and response bodies."""
