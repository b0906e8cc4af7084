"""Giving space back: trimming, release, deletion, compaction of one partition, sweeping what a crash left.

Owns every removal of stored data. Each is recorded in the main environment and validated again in the transaction
that records it, before a file is touched; whatever a crash interrupts is finished at the next open.
"""
