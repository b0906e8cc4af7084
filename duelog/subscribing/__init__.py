"""A topic's subscriptions as callers see them: attaching, readers, acknowledging. It knows nothing of sending."""
