"""Tenants, namespaces, their policies and schemas, over HTTP.

Owns what of them is asked and answered how; documents and the store keep it.
"""
