"""Delivery of one subscription: acknowledged positions, messages handed out, redeliveries, order by key.

Knows no topic's storage beyond a reader, no thread and no clock of its own.
"""
