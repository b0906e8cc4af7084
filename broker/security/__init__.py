"""Authentication, permissions and certificates. Knows no socket."""
