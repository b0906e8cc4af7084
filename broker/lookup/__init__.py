"""LOOKUP, partition metadata, listings, schemas: names and documents. Knows no socket."""
