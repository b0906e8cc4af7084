"""What one subscription has handed out, to whom, and what is handed out again; acknowledged positions.

Knows no topic's storage beyond a reader, no thread and no clock of its own.
"""
