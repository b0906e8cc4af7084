"""Listeners, connections and their write queues, dispatch of commands, shutdown. Knows no rule of producing."""
