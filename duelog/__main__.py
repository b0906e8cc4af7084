"""The command line, as `python -m duelog`."""

from runpy import run_module

if __name__ == "__main__":
    run_module("duelog.tools.cli.main", run_name="__main__")
