"""Delivery of one subscription: acknowledged positions, messages handed out, redeliveries, order by key.

Owns the counts of deliveries that outlive the process, too: their records, the delivery log, and what recovery makes of
it after a crash. Knows no topic's storage beyond a reader, no thread and no clock of its own.
"""
