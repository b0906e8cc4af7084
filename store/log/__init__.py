"""Append-only logs of runs inside an environment: ledgers, main logs, the catalog that lists them, visibility.

Knows no due order, no index and no subscription.
"""
