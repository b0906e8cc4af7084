"""The journal: a file of groups in which single messages are made durable together before they are applied.

Knows records and flushes; who writes, replays and checks them stands above.
"""
