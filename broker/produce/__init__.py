"""PRODUCER and SEND: access modes, answers in order, what goes to the engine. Knows no socket."""
