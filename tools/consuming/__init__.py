"""The commands on one subscription: receive its messages, look at them, and move it.

Each works whether another process has the store open or not. This room knows no commands of topics and policies
(`tools/remote/`), and none that send.
"""
