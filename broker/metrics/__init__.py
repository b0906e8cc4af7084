"""What a broker tells Prometheus, and the rates that REST tells as well. It counts nothing itself: services do."""
