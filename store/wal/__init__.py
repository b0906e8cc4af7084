"""The write-ahead log: a file of groups in which single messages are made durable together before they are applied.

Knows records and flushes; its writer, replay and check stand above.
"""
