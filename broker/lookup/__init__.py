"""LOOKUP, partition metadata, schemas: names and documents. Knows no socket."""
