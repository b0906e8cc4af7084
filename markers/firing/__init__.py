"""Firing: from loaded delay indexes to markers and frontiers in one group; loading and saving of indexes.

Knows no subscription. What may still fire is found and cancelled beside it (pending_entries.py).
"""
