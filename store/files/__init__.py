"""Files and directories below LMDB: syncing, free space, system errors, and pages read without opening them.

Knows no record, no environment and no message. Imports `store.errors` alone.
"""
