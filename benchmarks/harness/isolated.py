"""One measurement in a process of its own, so that nothing of the one before is in memory.

The child is `python -m benchmarks.harness.isolated` with the request on its standard input; its working directory is
the tree whose duelog is measured, which is what ``--against`` changes. When the child ends, so do the servers that it
started, whatever way it ended: they ask the kernel for it (peers/server.py).
"""

import gc
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .options import ROOT

MOST_SECONDS = 3_600.0
"""A measurement that takes longer is stopped and reported as failed."""


class MeasurementFailed(Exception):
    """A child ended without a result; the message says why."""


def run_isolated(
    function: str, arguments: dict[str, Any], *, tree: Path = ROOT, directory: Path | None = None
) -> dict[str, Any]:
    """Return the value of `function` ("benchmarks.module:name"), called in a child with `directory=` and `arguments`.

    The directory is new, and removed afterwards. Raises MeasurementFailed.
    """
    place = Path(tempfile.mkdtemp(prefix="duelog-bench-", dir=directory))
    place.chmod(0o755)  # a server may run as a user of its own
    request = json.dumps({"function": function, "arguments": arguments, "directory": os.fspath(place)})
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONSAFEPATH", None)  # the tree comes first on the path
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.harness.isolated"],
            cwd=tree,
            env=environment,
            input=request,
            text=True,
            capture_output=True,
            timeout=MOST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MeasurementFailed(f"took longer than {MOST_SECONDS:.0f} s") from None
    finally:
        shutil.rmtree(place, ignore_errors=True)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise MeasurementFailed(reason[0])
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def main() -> int:
    """Serve one request."""
    request = json.loads(sys.stdin.read())
    module, _, name = request["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    gc.collect()
    answer = function(directory=Path(request["directory"]), **request["arguments"])
    print()
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
