"""Every byte on disk that is not LMDB's: keys, records, runs, bodies, checksums.

Knows how things are written, not where nor when: no environment, no transaction.
"""
