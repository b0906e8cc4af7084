"""Messages in and out of a store: lines, calendars, Parquet."""
