"""Who a client is and what it may do; certificates. Knows no socket."""
