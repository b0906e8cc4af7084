"""The table of an open store's operations, and the local socket by which other processes ask for them.

`Operations` is the table: a typed method for each operation, with the right that a caller needs. The control socket,
REST under `/duelog/v1` and the command line's verbs beside an open store are made from it. The process that has a store
open for writing listens at the Unix socket `CONTROL` in the store's directory, with one thread that sleeps until a
client comes; a client of the same user, or root, sends lines of JSON.
This room knows nothing of the command line, and takes no path, no code and no pickled value from the socket.
"""
