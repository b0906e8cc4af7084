"""The wire: frames, commands, metadata, the session's states. No input or output, no clock; knows no engine."""
