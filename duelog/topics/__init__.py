"""Topics and subscriptions of an open store in memory, acknowledgements on their way to disk, dead letters."""
