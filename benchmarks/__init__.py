"""Benchmarks: named workloads on duelog and on what a user would pick instead, side by side.

    python -m benchmarks --list
    python -m benchmarks schedule deliver --runs 5

Every module directly in this package is a workload: its docstring says what is measured, its ``main(argv) -> int``
runs it, prints a table and a JSON line, and draws its plots. ``harness`` is what workloads share, ``peers`` are the
things measured. Nothing here is installed with the wheel, no server outlives its measurement, and everything listens
on 127.0.0.1.
"""
