"""LMDB environments with group commit: transactions, what is not applied to them yet, maps that grow, readers, caches.

Knows sealed records and nothing of what they mean: neither message nor topic.
"""
