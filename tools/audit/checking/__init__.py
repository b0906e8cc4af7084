"""The judgement of an audit: partitions by the facts, the facts by catalog and disk, and what holds what.

Knows neither where the facts are from (a store or an export), nor which process runs it, nor how findings are shown.
"""
