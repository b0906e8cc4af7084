"""Which broker serves which namespace: a table in a file, and questions that are passed on to another broker."""
