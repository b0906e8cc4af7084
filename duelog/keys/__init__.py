"""Messages under deduplication keys: sent once, replaced, found and cancelled by their key.

Owns what a key means. Knows neither how records are written (sending) nor how messages are taken back (markers).
"""
