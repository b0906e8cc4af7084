"""LMDB environments with group commit: transactions, maps that grow, readers, the page cache of their files.

Knows sealed records and nothing of what they mean: neither message nor topic.
"""
