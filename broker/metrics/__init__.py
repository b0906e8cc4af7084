"""Metrics of a broker for Prometheus, and the rates that REST reports too. It counts nothing itself: services do."""
