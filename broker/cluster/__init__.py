"""Which broker serves which namespace: a table in a file, questions passed on to another broker, and `duelog proxy`."""
