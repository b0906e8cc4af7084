"""Workers: functions of a program run for each message of a topic. Owns which run, and what becomes of their messages.

Knows subscriptions by their public face alone, and nothing of how messages are stored or handed out.
"""
