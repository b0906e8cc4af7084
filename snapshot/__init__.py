"""Saved delay indexes: writing a snapshot in parts, restoring one with tail replay, rebuilding one offline.

Owns how a restart comes by a delay index without reading the partition. A snapshot is only ever a shortcut: whatever
is wrong with it, the index can be replayed from the due column, and nothing here is the only copy of a fact.
"""
