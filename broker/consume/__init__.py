"""SUBSCRIBE, FLOW, ACK, SEEK: permits, dispatch, acknowledgements, order by key. Knows no socket."""
