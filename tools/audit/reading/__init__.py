"""Facts of an audit: what the main environment says at one point in time, copied out of one short read transaction.

Knows no partition's files, and judges nothing but whether its own records can be read.
"""
