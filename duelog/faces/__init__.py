"""Parts of the public face: a topic's subscriptions and readers, acknowledging, schedules. Not sending."""
