"""`python -m benchmarks [NAME...] [options]`: run workloads, all of them by default, each with the options given."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

_USAGE = """usage: python -m benchmarks [NAME ...] [--list] [options of the workloads]

Runs the named workloads, all of them without a name. Options come after the names and are handed to each workload:
  --runs K --quick --json FILE --plots DIR --against REV --only KEY,... --directory DIR -n N
`python -m benchmarks NAME --help` shows those of one workload.
"""

Main = Callable[[list[str]], int]


def names() -> list[str]:
    """Every workload: the modules directly in this folder."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def load(name: str) -> tuple[Main, str]:
    """A workload's `main` and the first line of its docstring."""
    module = importlib.import_module(f"benchmarks.{name}")
    doc = (module.__doc__ or "").strip().partition("\n")[0]
    return cast(Main, module.main), doc


def main(argv: list[str]) -> int:
    """Run what `argv` names; the worst exit status of the workloads, 2 for a name that there is not."""
    at = next((at for at, argument in enumerate(argv) if argument.startswith("-")), len(argv))
    chosen, options = argv[:at], argv[at:]
    known = names()
    if "--list" in options:
        for name in known:
            print(f"{name:<14} {load(name)[1]}")
        return 0
    if not chosen and set(options) & {"-h", "--help"}:
        print(_USAGE)
        return 0
    unknown = [name for name in chosen if name not in known]
    if unknown:
        print(f"no such workload: {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    return max(load(name)[0](options) for name in chosen or known)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
