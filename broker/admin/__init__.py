"""Administration over HTTP: Pulsar's REST under its own paths, and what duelog has beyond it under /duelog/v1.

Owns requests, rights, answers and the routes; what is done is done by the services and the store behind them.
"""
