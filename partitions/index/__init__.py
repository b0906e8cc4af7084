"""The delay index: which entries of a partition log have not fired, by due time, in buckets and an exact window.

Memory alone: no environment, no file.
"""
