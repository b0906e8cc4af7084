"""The audit of a store: what is lost, doubled, left over or held too long, and how its messages are spread over time.

`store_audit.py` makes it of a store, `exported.py` of an export: `facts.py` takes facts out of the main environment,
`partition_audit.py` judges each partition by them (a plain function that a loop or Spark's tasks call),
`audit_report.py` writes the tables down. Nothing in a store is changed.
"""

from .audit_tables import Audit
from .store_audit import audit_store

__all__ = ["Audit", "audit_store"]
