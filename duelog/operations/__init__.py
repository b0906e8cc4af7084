"""The table of an open store's operations, and the protocol by which other processes ask for them.

`face_table.py` offers the methods of the public face themselves, `Operations` those of the command line and of REST
under `/duelog/v1`. Each has the right that a caller needs. The process that has a store open for writing listens at the
Unix socket `CONTROL` in its directory, with two threads that sleep until a client comes; clients are of the same user,
or root. Over TCP it listens where it is told to (docs/protocol.md).
This room knows nothing of the command line, and takes no path, no code and no pickled value from a client.
"""
