"""The command `duelog`: thin mains over library functions, one module a group of commands."""
