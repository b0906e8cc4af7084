"""The page to look at while a store runs: operations of the table over HTTP, their answers as they change, its files.

Owns what a browser is given and asks. What is asked is an operation of the table, done by whoever has the store open;
the page itself stands in `front`, and `make page` puts what a browser loads into `assets`.
"""
