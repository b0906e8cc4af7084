"""Reading sealed partitions and main tables as columns, a key range at a time; for audits, exports and Spark."""
