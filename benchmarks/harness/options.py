"""The options that every workload takes."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a workload.

    runs: how often each subject is measured. quick: small and once, to see that it works. json: file that the JSON
    line is appended to. plots: folder that plots are written to; None: none are. against: a revision of duelog to
    compare with. only: keys of the subjects to measure; empty: all. n: numbers of messages.
    """

    runs: int
    quick: bool
    json: Path | None
    plots: Path | None
    against: str | None
    only: tuple[str, ...]
    n: tuple[int, ...]
    directory: Path | None
    extra: argparse.Namespace


def parse(
    argv: Sequence[str],
    name: str,
    doc: str | None,
    *,
    n: Sequence[int] = (),
    quick_n: Sequence[int] = (),
    more: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Options:
    """Read a workload's options; `n` and `quick_n` are its usual numbers of messages, `more` adds its own options."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=doc, allow_abbrev=False)
    parser.add_argument("--runs", type=_positive, metavar="K", help="measure each subject K times (3; quick: 1)")
    parser.add_argument("--quick", action="store_true", help="small and once: shows that it works, not how fast it is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the JSON line to FILE as well")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots of what was measured to DIR")
    parser.add_argument("--against", metavar="REV", help="compare with duelog of a git revision, and nothing else")
    parser.add_argument("--only", type=_keys, default=(), metavar="KEY,...", help="measure these subjects only")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="where stores are made (the temporary folder)")
    if n:
        parser.add_argument("-n", type=_number, action="append", metavar="N", help=f"messages ({_join(n)}); repeatable")
    if more is not None:
        more(parser)
    found = parser.parse_args(list(argv))
    chosen = tuple(getattr(found, "n", None) or (quick_n if found.quick else n))
    return Options(
        runs=found.runs or (1 if found.quick else 3),
        quick=found.quick,
        json=found.json,
        plots=found.plots,
        against=found.against,
        only=found.only,
        n=chosen,
        directory=found.directory,
        extra=found,
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _number(text: str) -> int:
    """An integer, also as 100k or 1M."""
    factors = {"k": 1_000, "M": 1_000_000}
    return int(text[:-1]) * factors[text[-1]] if text[-1] in factors else int(text)


def _keys(text: str) -> tuple[str, ...]:
    return tuple(key.strip() for key in text.split(",") if key.strip())


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)
