"""The audit of a store: what is lost, doubled, left over or held too long, and how its messages are spread over time.

Facts come from the main environment in one short read transaction (`facts.py`); each sealed partition is looked at by a
plain function of it and its facts (`partition_audit.py`), here in a loop or by Spark's tasks; what is left is put
together (`survey.py`) and written as JSON, Parquet and a page (`report.py`, `page.py`). Nothing in a store is changed.
"""

from __future__ import annotations

from .survey import audit_store
from .tables import Audit

__all__ = ["Audit", "audit_store"]
