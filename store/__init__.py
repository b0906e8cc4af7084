"""The ground floor: errors, clock, configuration, on-disk formats, LMDB environments, ledgers, catalog and cursors.

Owns every byte that reaches the disk and the rules by which it gets there: each format is defined once here, and
each environment shares its commits here. Knows nothing of due times beyond storing them, and imports nothing of the
floors above.
"""
