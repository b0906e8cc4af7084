"""Exceptions at each line of each operation: nothing is lost, doubled or early, and closing ends (exception_sweep)."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.disaster import sweep_mutants
from tests.disaster.exception_sweep import PATIENCE_S, sweep
from tests.disaster.fork_server import serve
from tests.disaster.kill_series import Server
from tests.disaster.sweep_scenarios import SCENARIOS
from tests.disaster.working import say
from tests.proof import PROOF, wrong_engines

pytestmark = [pytest.mark.fault, pytest.mark.series]

_WANTED = os.environ.get("DUELOG_SWEEP_POINTS", "24" if PROOF else "6")
"""How many points of each operation: a number, or "all"."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The process that forks one for each sweep, or what is left of it."""
    server = Server("tests.disaster.test_exception_sweep")
    yield server
    server.close()


def swept(server: Server, scenario: str, wanted: str, **options: Any) -> list[str]:
    """Sweep and return what was wrong; a run that hangs ends its process, and another goes on after it."""
    wrong: list[str] = []
    enough = options.get("enough", 1_000)
    begin = 0
    while True:
        count, current, status = -1, "", 0
        for fact in server.run({"scenario": scenario, "wanted": wanted, "begin": begin, **options}):
            match fact:
                case ["points", count]:
                    pass
                case ["begins", begin, current]:
                    pass
                case ["wrong", _, point, found]:
                    wrong.append(f"{point}: {'; '.join(found)}")
                case ["trouble", text]:
                    pytest.fail(f"{scenario}, {current}: {text}")
                case ["exit", status]:
                    status = os.waitstatus_to_exitcode(status)
        if not status:
            return wrong
        assert status > 0, f"{scenario}, {current}: killed by signal {-status}"
        wrong.append(f"{current}: hangs")  # its threads are shown on stderr
        begin += 1
        if begin >= count or len(wrong) >= enough:
            return wrong


def run(request: dict[str, Any]) -> None:
    """One sweep, in a process of its own."""
    mutant = request.get("mutant")
    if mutant is not None:
        sweep_mutants.apply(mutant)
    sweep(
        SCENARIOS[request["scenario"]],
        None if request["wanted"] == "all" else int(request["wanted"]),
        request["begin"],
        lambda said: say(*said),
        request.get("file"),
        PATIENCE_S if mutant is None else 5,
        request.get("enough", 1_000),
    )


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_an_exception_at_any_line_loses_and_doubles_nothing(server: Server, scenario: str) -> None:
    """The program goes on, or closes and opens the store: what was acknowledged comes once, and nothing hangs."""
    assert swept(server, scenario, _WANTED) == []


@pytest.mark.parametrize(("scenario", "file"), [("resolve", "store/env/reader_gate.py"), ("transact", "contextlib.py")])
def test_an_exception_as_a_read_ends_keeps_no_later_write_out(server: Server, scenario: str, file: str) -> None:
    """Its thread was taken to read for as long as its traceback was kept, and the store refused what it wrote."""
    assert swept(server, scenario, "40", file=file) == []


MUTANTS = [
    ("taken_is_not_given_back", "fire", "markers/firing/firing.py"),
    ("scheduler_dies", "serve", None),
    ("confirmed_by_the_caller", "fire", "store/env/commit_queue.py"),
    ("torn_logs_go_on", "fire", "markers/firing/pending_log.py"),
    ("torn_deliveries_go_on", "resolve", "delivery/dispatcher.py"),
    ("condition_entered", "send", "threading.py"),
]
"""Wrong engines: the operation and the file in which each is found out."""


@pytest.mark.parametrize(("mutant", "scenario", "file"), wrong_engines(MUTANTS, MUTANTS[0]))
def test_the_sweep_finds_a_wrong_engine_out(server: Server, mutant: str, scenario: str, file: str | None) -> None:
    """Faults that the engine had, planted again: a sweep that finds nothing anywhere proves nothing."""
    assert swept(server, scenario, "120", mutant=mutant, file=file, enough=1)


if __name__ == "__main__":
    serve(run)
