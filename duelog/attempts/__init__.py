"""How often messages were delivered without being acknowledged: counts that outlive the process.

Owns the counts of a subscription and their records, the delivery log, and what recovery makes of it after a crash. It
does not know what a redelivery is for, nor what becomes of a message that was delivered too often.
"""
