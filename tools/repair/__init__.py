"""Repair of a store that is not open: what the rest tells is made anew, what cannot be told is discarded."""
