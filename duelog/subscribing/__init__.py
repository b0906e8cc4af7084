"""A topic's subscriptions as callers see them: attaching, readers, acknowledging, looking on. Not sending."""
