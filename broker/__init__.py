"""The broker: a store served to Apache Pulsar clients over the binary protocol.

Needs `pip install 'duelog[broker]'`. `import duelog` does not import it.
"""
