"""An audit written down: JSON, Parquet files, and a page for people. Knows its tables only, and reads no store."""
