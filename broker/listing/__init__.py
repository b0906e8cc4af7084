"""GET_TOPICS_OF_NAMESPACE: which topics a namespace has, and which of them a pattern means. Knows no socket."""
