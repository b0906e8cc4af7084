"""Resources of administration over topics, subscriptions, messages and partitions.

Owns what a request does to them and the form of the answer; requests, rights and errors are the administration's.
"""
