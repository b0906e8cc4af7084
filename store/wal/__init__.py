"""The write-ahead log: segments of groups, each of which makes rows for several environments durable with one flush.

Knows rows, memtables and flushes, and nothing of what a row means; its writer, checkpoints and replay stand above.
"""
