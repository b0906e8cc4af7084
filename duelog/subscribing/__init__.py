"""A topic's subscriptions as callers see them: attaching, readers. It knows nothing of sending."""
