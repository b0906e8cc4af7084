"""GET_TOPICS_OF_NAMESPACE: the topics of a namespace, and those that a pattern selects. Knows no socket."""
