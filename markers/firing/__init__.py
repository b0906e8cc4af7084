"""Firing: from loaded delay indexes to markers and frontiers in one group; loading and saving of indexes.

Knows no subscription. Cancelling and rescheduling stand beside it (withdrawal.py).
"""
