"""The audit of a store: what is lost, doubled, left over or held too long, and how its messages are spread over time.

`survey.py` makes it of a store, `exported.py` of an export: `facts.py` takes facts out of the main environment,
`partition_audit.py` judges each partition by them (a plain function that a loop or Spark's tasks call), `gathering.py`
puts the results into tables, `report/` writes those down. Nothing in a store is changed.
"""

from __future__ import annotations

from .survey import audit_store
from .tables import Audit

__all__ = ["Audit", "audit_store"]
