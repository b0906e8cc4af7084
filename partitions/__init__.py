"""Time partitions: due-time arithmetic, the partition and its logs, the due column, the delay index.

Owns the question "which entries of a partition log are due, and in what order". Does not move anything to the main
log: it says what is due, and the floors above decide what becomes of it.
"""
