"""Policies: what is kept, how long and how it is delivered, by scope; their precedence and their records.

Knows no topic's state: the parts that obey policies ask for them.
"""
