"""From encoded messages to durable entries: delay policies, producers, the WAL writer, its checkpoints, replay."""
