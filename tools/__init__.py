"""Tools over the library: the command line, check, snapshot rebuild, import and export, demo, jobs on Spark.

Owns what a person or a cron job runs. Tools are thin: each parses its arguments, calls functions of the floors below
and prints; nothing of the library imports them.
"""
