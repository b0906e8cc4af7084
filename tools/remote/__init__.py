"""What reaches beyond a directory: draining a store to another broker, and commands that take a directory or a server.

Knows nothing of the binary protocol's connections: that is the clients', or the broker's.
"""
