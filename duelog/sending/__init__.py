"""From encoded messages to durable entries: partitions and main log side by side, delay policies, producers."""
