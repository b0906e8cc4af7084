"""Operations of an open store by name, with JSON in and out, and the local socket by which other processes ask.

The process that has a store open for writing listens at the Unix socket `CONTROL` in the store's directory, with one
thread that sleeps until a client comes; a client of the same user, or root, sends lines of JSON. The command line asks
in the same words whether it opens the store itself or another process has it open, so that its answers are the same.
This room knows nothing of the command line, and takes no path, no code and no pickled value from the socket.
"""
