"""A chat load on a running server, and the report of it."""
