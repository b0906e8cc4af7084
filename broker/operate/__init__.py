"""Resources of administration over topics, subscriptions, messages, partitions, and jobs that read the whole store.

Owns what a request does to them and the form of the answer; requests, rights and errors are the administration's.
"""
