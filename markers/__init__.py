"""Firing: appending delay markers to the main log, resolving a marker to its message, the topic-level tracker.

Owns the step from "due" to "visible to subscriptions", which happens in one transaction of the main environment or
not at all. Does not decide when a partition ends or what is deleted.
"""
