"""`duelog proxy`: one address for several brokers. Asks them what clients look up; splices every other connection."""
