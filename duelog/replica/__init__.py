"""The copy of a store in object storage: its log, shipped as it is written, manifests of its files, and restoring.

The room owns what lies under a replica's prefix (docs/format.md, "Replica") and the file REPLICA of a store. It knows
groups of the write-ahead log by their places, and not what is in them. Only `bucket.py` imports obstore; nothing
imports this room before a store with `replica=` is opened.
"""
